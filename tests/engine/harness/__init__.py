"""Real engines, stock and ours, driven through the same script.

`spec.py` says what an engine is, `engines.py` which there are; `workload.py` what can be asked of them, `scenarios.py`
what is asked; `inproc.py` and `served.py` ask it, in one process and through several; `main.py` does so in a process
of its own, which `processes.py` starts once with stock and once with ours.
"""
