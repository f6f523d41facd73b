"""Layer 3: what the engine observes about itself. Pure: no vLLM, no torch, no I/O."""
