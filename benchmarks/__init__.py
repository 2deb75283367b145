"""Side-by-side measurements, as ratios and growth: `python -m benchmarks [growth linear disk journal] [--strict]`."""
