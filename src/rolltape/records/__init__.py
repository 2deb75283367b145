"""The shared vocabulary: frozen records, checked when they are made, and the closed lists."""
