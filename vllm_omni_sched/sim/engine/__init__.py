"""One vLLM engine, step by step, under the policies that steer the real one.

server.py     the engine: who comes, and who goes
front.py      its front end
steps.py      its steps, one behind the other
leap.py       steps that nobody has looked at yet
prompts.py    whose prompts are computed in a step
decoding.py   those that decode: a token each in every step
encoding.py   which items are encoded in a step; the encoder cache
ahead.py      which items go to the lane, and who waits for them
lane.py       the encoder beside the steps
waiting.py    those that wait, by arrival or by SLA
view.py       what policies see of all that
policies.py   the policies, made of the options as in the real engine
sequence.py   a request in the engine
limits.py     what it was started with
hosted.py     an engine that shares the cores of a host
"""
