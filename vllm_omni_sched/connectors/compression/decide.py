"""The policy that decides whether to compress a buffer, and how, from what was learnt of codecs and links. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.connectors.compression.codec import Kind
from vllm_omni_sched.connectors.compression.dtypes import ITEM_BYTES, Bytes
from vllm_omni_sched.connectors.compression.options import Mode
from vllm_omni_sched.resource.rate import Rate

OVERHEAD_SECONDS = 5e-4
"""Time that a compressed buffer takes on both sides besides encoding and decoding: it is wrapped and unwrapped by code
that has not run for a while. Measured between processes that are idle between two messages (`benchmarks.hosts`)."""
MAX_ROW_BYTES = 1 << 20
MIN_ROWS = 8

Stream = tuple[str, Kind, str]
"""Edge, kind and data type: the buffers of one stream have similar compression ratios."""


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


class Reason(str, Enum):
    """Reason why a buffer is sent raw or compressed."""

    OFF = "off"
    TOO_SMALL = "too_small"
    SHARED_MEMORY = "shared_memory"
    NO_CODEC = "no_codec"
    LOSSY_NOT_ALLOWED = "lossy_not_allowed"
    PROBE = "probe"
    DOES_NOT_SHRINK = "does_not_shrink"
    LINK_FASTER = "link_faster"
    PAYS = "pays"
    ALWAYS = "always"
    DECLINED = "declined"  # the codec cannot keep its error bound for these values


@dataclass(frozen=True)
class Measured:
    """Measurements of a codec on buffers of this type on this edge.

    ``size_fraction``: bytes after / bytes before. Seconds are per byte before encoding.
    """

    size_fraction: float
    encode_seconds_per_byte: float
    decode_seconds_per_byte: float


@dataclass(frozen=True)
class Candidate:
    """A codec that takes the buffer; ``measured`` is None until it was tried."""

    codec: str
    lossy: bool
    measured: Measured | None = None


@dataclass(frozen=True)
class Snapshot:
    """Describes one buffer about to be sent.

    ``link_bytes_per_second``: None if the receiver reads the sender's memory. ``lossy``: the one lossy codec that the
    edge allows. ``probe_due``: whether it is time to measure again.
    """

    num_bytes: int
    link_bytes_per_second: float | None
    candidates: tuple[Candidate, ...]
    mode: Mode = Mode.AUTO
    lossy: str | None = None
    min_bytes: int = 0
    probe_due: bool = False


@dataclass(frozen=True)
class Plan:
    """A decision: measure the codecs in ``probe`` and decide again, or send with ``codec``, or raw if it is None.

    Seconds are of the best codec, and of sending raw, if both were compared.
    """

    reason: Reason
    codec: str | None = None
    probe: tuple[str, ...] = ()
    raw_seconds: float | None = None
    compressed_seconds: float | None = None


def raw_anyway(mode: Mode, num_bytes: int, min_bytes: int, link_bytes_per_second: float | None) -> Reason | None:
    """Return the reason to send a buffer raw by rule 1 of `decide`, which needs no codec; None if it does not apply."""
    if mode is Mode.OFF:
        return Reason.OFF
    if num_bytes < max(1, min_bytes):
        return Reason.TOO_SMALL
    return Reason.SHARED_MEMORY if link_bytes_per_second is None and mode is Mode.AUTO else None


def decide(snapshot: Snapshot) -> Plan:
    """Decide how to send a buffer.

    1. It is sent raw with mode 'off', below ``min_bytes``, and on shared memory unless the mode is 'always'.
    2. It is sent raw if no codec takes it, or none that the edge allows.
    3. Codecs that are not measured yet are probed first; when it is time to measure again, all are.
    4. It is sent raw if no codec makes it smaller.
    5. The best codec has the least ``encode + send(compressed) + decode + OVERHEAD_SECONDS``; the earlier candidate
       wins a tie. On shared memory, it is the one that shrinks most.
    6. The best codec is used if that is less than ``send(raw)``; with mode 'always', in any case.
    """
    link = snapshot.link_bytes_per_second
    if reason := raw_anyway(snapshot.mode, snapshot.num_bytes, snapshot.min_bytes, link):
        return Plan(reason)
    allowed = [one for one in snapshot.candidates if not one.lossy or one.codec == snapshot.lossy]
    if not allowed:
        return Plan(Reason.LOSSY_NOT_ALLOWED if snapshot.candidates else Reason.NO_CODEC)
    if probe := tuple(one.codec for one in allowed if snapshot.probe_due or one.measured is None):
        return Plan(Reason.PROBE, probe=probe)
    known = [(one.codec, one.measured) for one in allowed if one.measured is not None]
    smaller = [(codec, measured) for codec, measured in known if measured.size_fraction < 1]
    if not smaller:
        return Plan(Reason.DOES_NOT_SHRINK)
    if link is None:
        return Plan(Reason.ALWAYS, min(smaller, key=lambda one: one[1].size_fraction)[0])
    seconds, codec = min(
        ((_seconds(measured, snapshot.num_bytes, link), codec) for codec, measured in smaller), key=lambda one: one[0]
    )
    raw_seconds = snapshot.num_bytes / link
    if snapshot.mode is Mode.ALWAYS:
        return Plan(Reason.ALWAYS, codec, raw_seconds=raw_seconds, compressed_seconds=seconds)
    pays = seconds < raw_seconds
    return Plan(
        Reason.PAYS if pays else Reason.LINK_FASTER,
        codec if pays else None,
        raw_seconds=raw_seconds,
        compressed_seconds=seconds,
    )


def _seconds(measured: Measured, num_bytes: int, link: float) -> float:
    """Return the time to encode, send and decode, one after the other, and of what goes with it."""
    work = measured.encode_seconds_per_byte + measured.decode_seconds_per_byte
    return num_bytes * (work + measured.size_fraction / link) + OVERHEAD_SECONDS
