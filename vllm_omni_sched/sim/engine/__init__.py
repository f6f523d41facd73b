"""Simulate one vLLM engine, step by step, under the core that controls the real one, `core.engine`.

server.py     the engine: its front end, and its steps
prompts.py    the prompts computed in a step, and the items encoded; the encoder cache
requests.py   its requests: those that wait, and those that decode
lane.py       the encoder beside the steps
view.py       the state that the core sees
limits.py     its sizes at start, and its core
hosted.py     an engine that shares the cores of a host
"""
