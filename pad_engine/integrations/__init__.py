"""Other runtimes with this project's acceptance rules: chain.py is what they share, transformers.py the first of
them."""
