"""Models: config.py and decoder.py (what runs), sources.py and weights.py (where it comes from), loader.py."""
