"""Start of a pipeline: hooks, checks, and what vLLM-Omni's configuration says."""
