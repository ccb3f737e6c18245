"""The command line, and later the servers."""
