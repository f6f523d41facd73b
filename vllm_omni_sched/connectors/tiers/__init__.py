"""Several transports as tiers, and the movement of messages between them.

`policy` decides, `place` puts a message into a tier, `ledger` records what this process has put where, `carry` moves
one message so that it is never lost and never received twice, `duplicates` drops second copies, and `transport`
combines all into one.
"""

from vllm_omni_sched.connectors.tiers.options import TiersOptions
from vllm_omni_sched.connectors.tiers.place import Tier
from vllm_omni_sched.connectors.tiers.transport import TieredTransport

__all__ = ["Tier", "TieredTransport", "TiersOptions"]
