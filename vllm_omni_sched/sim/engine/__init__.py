"""One vLLM engine, step by step, under the policies that steer the real one.

sequence.py   a request in the engine
decoding.py   those that decode: a token each in every step
encoding.py   which items are encoded, where and when; the encoder cache
lane.py       the encoder beside the steps
waiting.py    those that wait, by arrival or by SLA
prompts.py    whose prompts are computed in a step
policies.py   the policies, made of the options as in the real engine
server.py     the engine: what happens when
"""
