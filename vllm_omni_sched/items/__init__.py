"""State of the multimodal items of one engine: their positions, the items that workers hold, and what may be freed.

Pure: no vLLM, no torch, no clock. An item is any object with an ``mm_position``.
"""

from vllm_omni_sched.items.feature_list import FeatureList, ends_after, in_order, is_in_line, num_covered
from vllm_omni_sched.items.index import FeatureWindows, ItemIndex
from vllm_omni_sched.items.session import SessionMirror, SessionTracker
from vllm_omni_sched.items.spill import SpillFile

__all__ = [
    "FeatureList",
    "FeatureWindows",
    "ItemIndex",
    "SessionMirror",
    "SessionTracker",
    "SpillFile",
    "ends_after",
    "in_order",
    "is_in_line",
    "num_covered",
]
