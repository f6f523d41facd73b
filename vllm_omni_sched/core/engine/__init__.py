"""Decide what one engine does next: the same code under vLLM's scheduler and under the simulated engine.

core.py           `EngineCore`: the events of an engine, and the parts that answer them
requests.py       the requests of the core, and the view of the engine that a driver gives it
encode_ahead.py   items encoded in the lane, and requests that wait for them
ledger.py         the state of each encode that runs ahead
encode_rounds.py  items held back until decoding requests are finished
step_limits.py    requests, prompt tokens and encoder embeddings of a step
history.py        the log of transitions, which tells the story of one request
"""
