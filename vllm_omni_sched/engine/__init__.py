"""Adapters between vLLM's objects and the pure policies: read state, ask for a decision, apply it. No policy here."""
