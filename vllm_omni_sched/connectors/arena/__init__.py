"""The path between processes of one host: preallocated shared memory.

Each process that sends has an *outbox*: one file with an index, a ring for small messages, and pools by modality for
the others. It alone gives out and takes back room in it, so no lock is held while a message is written. Each process
that receives has an *inbox*, which finds outboxes in a private directory and claims messages under a lock of one byte
of the file, which the kernel lets go of when the process dies.
"""

from vllm_omni_sched.connectors.arena.options import ArenaOptions, PoolOptions
from vllm_omni_sched.connectors.arena.path import ArenaPath

__all__ = ["ArenaOptions", "ArenaPath", "PoolOptions"]
