"""Layer 1: what the work is, and in which order it deserves to run."""
