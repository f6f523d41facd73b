"""Streaming sessions in vLLM's scheduler: short worker messages, released data, and sessions that vLLM would lose."""
