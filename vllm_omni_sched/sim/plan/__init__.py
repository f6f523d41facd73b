"""Plan a cluster for a trace: the cheapest devices, replicas, flags of vLLM and options of this package within an SLO.

load.py       the requests that one replica gets, for training and held out
systems.py    what can be rented and set: devices, how a model is split, flags, options; costs and commands
trial.py      one replica, or one group, under its requests
search.py     the search, first without our options, then with them
split.py      the search for prefill and decode replicas
findings.py   held-out results, what limits the plan, and how much more it would take
compare.py    the plans of stock and of ours that meet the SLO with the held-out requests
"""
