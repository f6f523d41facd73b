"""Replicas that are no LLM engine: plain servers, decoders of video, encoders on their own device."""
