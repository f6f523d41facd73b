"""Lending KV blocks of a CPU engine to encodes: blocks of vLLM's pool, their memory, and admission beside a loan."""
