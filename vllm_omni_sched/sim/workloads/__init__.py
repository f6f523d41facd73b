"""Generate streams of requests from published statistics, from seasons, and from recorded traces.

`registry.build` makes a workload from the ``[workload]`` table of a scenario, `base.requests` starts it.
"""
