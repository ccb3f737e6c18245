"""Drafters: what may follow. One file each; drafter.py says what one must offer."""
