"""Encoder inputs and the encoder cache of vLLM's scheduler: what is encoded, kept, evicted and freed."""
