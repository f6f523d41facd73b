"""Transport through files, slow and large: messages that wait for long are kept here, below faster tiers.

Each message is one file in a private directory, under a name that its receiver can derive. It is written under another
name and then renamed. A receiver takes it by renaming it again, so that only one receiver gets it.
"""

from vllm_omni_sched.connectors.disk.transport import DiskOptions, DiskTransport

__all__ = ["DiskOptions", "DiskTransport"]
