"""Transport between hosts, through objects of a Mooncake store.

A message is written once into a registered buffer, copied from there into this process's own segment of the store, and
read by its receiver straight into a registered buffer of its own, of which the payload is a view. The master only
knows where objects are: if it restarts, messages in flight are lost, and senders say so.

Every call into the library runs on a separate thread and has a deadline (`calls`), because the library has none;
`store` names what its return codes mean.
"""

from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.transport import MooncakeTransport

__all__ = ["MooncakeOptions", "MooncakeTransport"]
