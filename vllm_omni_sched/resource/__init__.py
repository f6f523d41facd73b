"""Layer 2 (resource): decide how much of the device each kind of work gets now."""
