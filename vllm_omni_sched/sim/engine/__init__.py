"""Simulate one vLLM engine, step by step, under the core that controls the real one, `core.engine`.

server.py     the engine: arrivals and ends of requests
front.py      its front end
steps.py      its steps, one after another
prompts.py    the prompts computed in a step
decoding.py   decoding requests: a token each in every step
encoding.py   the items encoded in a step; the encoder cache
ahead.py      the actions of encode-ahead: the lane, and requests that wait for it
lane.py       the encoder beside the steps
waiting.py    waiting requests, by arrival or by SLA
view.py       the state that the core sees
sequence.py   a request in the engine
limits.py     its sizes at start, and its core
hosted.py     an engine that shares the cores of a host
"""
