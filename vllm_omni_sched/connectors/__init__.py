"""Transfer of tensors between stages: framing, paths, and the choice among them. Independent of vLLM.

`framing` makes one flat message of a payload, `base` defines a path, `arena` is the path between processes of one host,
`disk` the one through files, and `tiers` keeps messages in either; `compression` makes buffers smaller where that takes
less time. `vllm_omni_sched.omni` presents them to vLLM-Omni as OmniConnectors.
"""
