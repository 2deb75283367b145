"""The web page over a run: what its server knows, answers and ships. It only reads; all it writes is a cache."""
