"""Several paths as tiers: what is kept where, and what moves messages between them.

`policy` decides, `books` knows what this process has put where, `carry` moves one message so that it is never lost and
never got twice, `path` shows all of it as one path.
"""

from vllm_omni_sched.connectors.tiers.options import TiersOptions
from vllm_omni_sched.connectors.tiers.path import Tier, TieredPath

__all__ = ["Tier", "TieredPath", "TiersOptions"]
