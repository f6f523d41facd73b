"""Compression of buffers between stages, where that takes less time.

* `Compressor`: called by connectors; it decides per buffer, learns per edge and data type, and caches by content.
* `decide`: the policy alone.
* `Codec`: token ids (`ids`), any data (`shuffle_lz4`, `shuffle_zstd`), PCM (`flac`); with loss, on edges that allow it,
  features (`int8`, `fp8`) and PCM (`mulaw`).
"""

from vllm_omni_sched.connectors.compression.codec import Codec, ErrorBound, Kind, kind_of
from vllm_omni_sched.connectors.compression.compressor import (
    RAW,
    Buffer,
    CacheCounts,
    CompressionCache,
    Compressor,
    Counts,
    Packed,
)
from vllm_omni_sched.connectors.compression.decide import Candidate, Measured, Plan, Reason, Snapshot, decide
from vllm_omni_sched.connectors.compression.options import CompressionOptions, EdgeOptions, Lossy, Mode, load_options
from vllm_omni_sched.connectors.compression.registry import CODECS, Codecs, load_codecs

__all__ = [
    "CODECS",
    "RAW",
    "Buffer",
    "CacheCounts",
    "Candidate",
    "Codec",
    "Codecs",
    "CompressionCache",
    "CompressionOptions",
    "Compressor",
    "Counts",
    "EdgeOptions",
    "ErrorBound",
    "Kind",
    "Lossy",
    "Measured",
    "Mode",
    "Packed",
    "Plan",
    "Reason",
    "Snapshot",
    "decide",
    "kind_of",
    "load_codecs",
    "load_options",
]
