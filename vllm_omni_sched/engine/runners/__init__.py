"""Mixins for vLLM's model runners."""
