"""Options for a user's trace and SLO.

space.py     which options, and between which bounds
search.py    trials: what does best under the training seeds
gain.py      what the best few bring under seeds that the search has not seen
replay.py    a trace as an engine is given it, other under each seed
"""
