"""Several paths as tiers: what is kept where, and what moves messages between them.

`policy` decides, `place` puts a message there, `books` knows what this process has put where, `carry` moves one message
so that it is never lost and never got twice, `sieve` drops second copies, `path` shows all of it as one path.
"""

from vllm_omni_sched.connectors.tiers.options import TiersOptions
from vllm_omni_sched.connectors.tiers.path import TieredPath
from vllm_omni_sched.connectors.tiers.place import Tier

__all__ = ["Tier", "TieredPath", "TiersOptions"]
