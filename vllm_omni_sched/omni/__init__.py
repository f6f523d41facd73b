"""Integrate with vLLM-Omni: connectors and schedulers in its own interfaces, and their registration."""
