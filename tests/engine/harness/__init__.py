"""Real engines, stock and ours, driven through the same script.

`spec.py` says which engine, `workload.py` what is asked of it, `scenarios.py` lists the scripts, `inproc.py` and `served.py`
drive them, `main.py` runs them in a process of its own, `pair.py` starts that process once with stock and once with ours.
"""
