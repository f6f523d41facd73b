"""The journal of faults: what was seen in a pipeline, what was decided, and what was done."""
