"""Transport between processes of one host, through preallocated shared memory.

Each sending process has an *outbox*: one file with an index, a ring for small messages, and pools by modality for the
others. Only the sender allocates and frees room in it, so no lock is held while a message is written. Each receiving
process has an *inbox*, which finds outboxes in a private directory and claims messages under a lock of one byte of the
file, which the kernel releases when the process dies.
"""

from vllm_omni_sched.connectors.arena.options import ArenaOptions, PoolOptions
from vllm_omni_sched.connectors.arena.transport import ArenaTransport

__all__ = ["ArenaOptions", "ArenaTransport", "PoolOptions"]
