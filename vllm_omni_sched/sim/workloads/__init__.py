"""Who comes when, with what: streams of requests from published statistics, from seasons, and from recorded traces.

`registry.build` makes a workload of the ``[workload]`` table of a scenario, `base.requests` lets it begin.
"""
