"""The web page for runs: its server, its answers and its built files. It writes only the index, tags and notes."""
