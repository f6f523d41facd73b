"""Compare the simulator with a pipeline of vLLM-Omni: the same arrivals, measured and simulated."""

SHOULD_BE = {"P50": 0.15, "P99": 0.25}
"""Largest relative error of a simulated figure."""
