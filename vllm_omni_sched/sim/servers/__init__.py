"""Simulate replicas other than LLM engines: plain servers, video decoders, encoders on their own device."""
