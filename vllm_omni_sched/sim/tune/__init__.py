"""Tune options for a user's trace and SLO.

space.py     the options and vLLM's flags, and their bounds
search.py    trials: the best options under the training seeds
gain.py      the gain of the best few under seeds that the search has not seen
evaluate.py  the load under which options are measured: a trace, or a scenario
"""
