"""Adapters: read vLLM's objects, ask the pure parts, apply what they say. No policy here."""
