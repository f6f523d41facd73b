"""Transport between processes of one host for tensors that stay on their device.

A message goes through the arena. Its device tensors are copied on the device, into one block per device, and the
message carries a *handle* of that block instead. The receiver's stream waits for the sender's event; the processes do
not wait for each other. The receiver's lease on the message is also the lease on the block: whichever process dies, the
block is freed or given back together with the message.

`CudaShare` makes handles of blocks and opens them, by CUDA IPC. A transport by NIXL, UCX or NCCL would take its place.
"""

from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcOptions
from vllm_omni_sched.connectors.cuda_ipc.transport import CudaIpcTransport

__all__ = ["CudaIpcOptions", "CudaIpcTransport"]
