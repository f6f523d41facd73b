"""Encode-ahead in vLLM: an EC connector whose worker half runs the encoder in a lane of the same device."""
