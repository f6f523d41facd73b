"""Layer 3 (monitor): observe the engine. Pure: no vLLM, no torch, no I/O."""
