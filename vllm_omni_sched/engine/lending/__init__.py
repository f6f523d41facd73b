"""Lending KV blocks of a CPU engine to encodes: blocks of vLLM's pool, and the pages of memory behind them."""
