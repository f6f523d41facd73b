"""Layer 1 (graph): decide what the work is and in which order it runs."""
