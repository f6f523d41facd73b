"""Tensors between stages: framing, paths, and what chooses among them. No vLLM in here.

`framing` makes one flat message of a payload, `base` says what a path is, `arena` is the path between processes of one
host, `disk` the one through files, `tiers` keeps messages in the one or the other; `compression` makes buffers smaller
where that takes less time. `vllm_omni_sched.omni` shows them to vLLM-Omni as OmniConnectors.
"""
