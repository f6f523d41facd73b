"""The path between processes of one host for tensors that stay on their device.

A message goes through the arena; its device tensors are copied on the device, into one block per device, and in their
place goes a *handle* of that block. The receiver's stream waits for the sender's event, not the processes for each
other. The lease that the receiver has on the message is the lease on the block: what happens to the message, whoever
dies, happens to the block.

`DeviceShare` is what makes handles of blocks and blocks of handles: CUDA IPC here. A path by NIXL, UCX or NCCL is
another one.
"""

from vllm_omni_sched.connectors.cuda_ipc.options import CudaIpcOptions
from vllm_omni_sched.connectors.cuda_ipc.share import DeviceShare
from vllm_omni_sched.connectors.cuda_ipc.transport import CudaIpcTransport

__all__ = ["CudaIpcOptions", "CudaIpcTransport", "DeviceShare"]
