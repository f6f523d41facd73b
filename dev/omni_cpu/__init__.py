"""vLLM-Omni on a CPU: what it lacks for that, out of tree, and pipelines of tiny models.

Child processes find it through the entry points that `distribution.py` writes.
"""
