"""Questions that need a GPU, and no vLLM: torch is enough."""
