"""Multimodal items of one engine: where they are, what the worker has of them, what may be let go.

Pure: no vLLM, no torch, no clock; items are anything with an ``mm_position``.
"""

from vllm_omni_sched.items.feature_list import FeatureList
from vllm_omni_sched.items.in_line import ends_after, in_order, is_in_line, num_covered
from vllm_omni_sched.items.index import ItemIndex
from vllm_omni_sched.items.session import SessionMirror, SessionTracker
from vllm_omni_sched.items.spill import SpillFile
from vllm_omni_sched.items.windows import FeatureWindows

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
