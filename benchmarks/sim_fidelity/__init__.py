"""Does the simulator say what the engine does? The load of `benchmarks.mixed`, measured and simulated."""

SHOULD_BE = {"P50": 0.15, "P99": 0.25}
"""How far a simulated figure may be from the measured one, as a part of that."""
