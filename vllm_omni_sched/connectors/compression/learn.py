"""Measurements of codecs, learnt per edge and data type from encoded buffers."""

from vllm_omni_sched.connectors.compression.codec import Kind
from vllm_omni_sched.connectors.compression.decide import Measured
from vllm_omni_sched.connectors.compression.dtypes import ITEM_BYTES, Bytes
from vllm_omni_sched.resource.rate import Rate

MAX_ROW_BYTES = 1 << 20
MIN_ROWS = 8

Stream = tuple[str, Kind, str]
"""Edge, kind, data type: buffers of one stream shrink alike."""


class _Learnt:
    def __init__(self) -> None:
        self.size = Rate(1.0)  # bytes per byte
        self.encode = Rate(0.0)
        self.decode = Rate(0.0)


class Ledger:
    """Moving averages of size fraction, encode and decode seconds per byte of every codec on every stream.

    1. A codec is known on a stream once it was both encoded and decoded there; declining counts as not shrinking.
    2. Probes are due again after ``reprobe_every`` buffers of a stream, whatever was decided about them.

    It grows with the edges of the deployment, not with its requests.
    """

    def __init__(self, reprobe_every: int) -> None:
        self.reprobe_every = reprobe_every
        self._learnt: dict[tuple[Stream, str], _Learnt] = {}
        self._since_probe: dict[Stream, int] = {}

    def measured(self, stream: Stream, codec: str) -> Measured | None:
        """Return the measurements of a codec on a stream; None if there are none."""
        learnt = self._learnt.get((stream, codec))
        if learnt is None or not (learnt.encode.is_measured and learnt.decode.is_measured):
            return None
        return Measured(learnt.size.per_unit, learnt.encode.per_unit, learnt.decode.per_unit)

    def count(self, stream: Stream) -> bool:
        """Count one more buffer of this stream; return whether probes are due."""
        since = self._since_probe.get(stream, 0) + 1
        due = since > self.reprobe_every
        self._since_probe[stream] = 1 if due else since
        return due

    def encoded(self, stream: Stream, codec: str, num_bytes: int, to_bytes: int | None, seconds: float) -> None:
        """Record that a buffer was encoded to ``to_bytes``, or was declined, in ``seconds``."""
        learnt = self._learnt.setdefault((stream, codec), _Learnt())
        learnt.size.observe(num_bytes, num_bytes if to_bytes is None else to_bytes)
        learnt.encode.observe(num_bytes, seconds)
        if to_bytes is None and not learnt.decode.is_measured:
            learnt.decode.observe(num_bytes, 0.0)

    def decoded(self, stream: Stream, codec: str, num_bytes: int, seconds: float) -> None:
        """Record that decoding to ``num_bytes`` took ``seconds``."""
        self._learnt.setdefault((stream, codec), _Learnt()).decode.observe(num_bytes, seconds)


def sample(raw: Bytes, dtype: str, shape: tuple[int, ...], sample_bytes: int) -> tuple[Bytes, tuple[int, ...]]:
    """Return about ``sample_bytes`` from a tensor's middle: whole rows of its last dimension, at least 8 if there are.

    Rows of more than 1 MiB are cut; so is a vector.
    """
    item = ITEM_BYTES[dtype]
    row = item * shape[-1] if len(shape) >= 2 and 0 < item * shape[-1] <= MAX_ROW_BYTES else item
    rows = min(raw.size // row, max(MIN_ROWS, sample_bytes // row))
    start = (raw.size // row - rows) // 2 * row
    part = raw[start : start + rows * row]
    return part, (rows, shape[-1]) if row > item else (rows,)
