"""The web page over runs: its server, its answers and its built files. It reads runs, and writes only their index."""
