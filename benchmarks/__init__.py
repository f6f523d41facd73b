"""Benchmarks: one folder per question, ours against stock in one run. `python -m benchmarks` lists them."""
