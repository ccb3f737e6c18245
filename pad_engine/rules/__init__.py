"""Acceptance rules: which drafted tokens stay. One file each; rule.py says what one must offer."""
