"""Layer 2: how much of the device each kind of work gets now."""
