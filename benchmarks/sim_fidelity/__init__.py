"""Compare the simulator with the engine: the load of `benchmarks.mixed`, measured and simulated."""

SHOULD_BE = {"P50": 0.15, "P99": 0.25}
"""Largest relative error of a simulated figure."""
