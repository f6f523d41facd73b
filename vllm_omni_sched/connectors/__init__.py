"""Transfer of tensors between stages: framing, transports, and the choice among them. Independent of vLLM.

`framing` makes one flat message of a payload. `transport` is the interface, `medium` the life of a message, which is
the same in all media: `arena` (shared memory of one host), `disk` (files), `mooncake` (between hosts) and `cuda_ipc`
(device memory). On top of them `routing` chooses a transport for each message, `tiers` keeps messages in several, and
`compression` makes buffers smaller where that takes less time. `vllm_omni_sched.omni` presents them to vLLM-Omni as
OmniConnectors.

`encodings` is the store of encodings that the engines of a host share.
"""
