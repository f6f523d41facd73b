"""Several paths as tiers, and the movement of messages between them.

`policy` decides, `place` puts a message into a tier, `books` records what this process has put where, `carry` moves one
message so that it is never lost and never received twice, `sieve` drops second copies, and `path` combines all into one
path.
"""

from vllm_omni_sched.connectors.tiers.options import TiersOptions
from vllm_omni_sched.connectors.tiers.path import TieredPath
from vllm_omni_sched.connectors.tiers.place import Tier

__all__ = ["Tier", "TieredPath", "TiersOptions"]
