"""What would ten minutes on this GPU change in the defaults? Each part needs torch alone, but for vLLM's own."""
