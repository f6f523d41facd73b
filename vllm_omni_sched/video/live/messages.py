"""Messages between the owner of a stream and its process."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_omni_sched.video.pool.messages import Failure


class StreamSettings(msgspec.Struct, tag=True, frozen=True):
    """Carries the parameters of decoding; the first message to the process.

    Attributes:
        slots: number of slots of the ring.
        drop: whether frames are left out if no slot is free, instead of waiting for one.
    """

    every: int
    fps: float | None
    slots: int
    drop: bool
    max_pixels: int


class RingMemory(msgspec.Struct, tag=True, frozen=True):
    """Carries the memory for frames. Descriptors: the ring's memory, and an event set when a slot is free again."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The process is in its sandbox; ``missing`` are the parts of it that this system does not have."""

    missing: tuple[str, ...]


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The properties of the stream, after which `RingMemory` is awaited. Size of frames after rotation, in pixels."""

    width: int
    height: int


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """A frame is in its slot."""

    slot: int
    number: int
    pts_seconds: float


class Ended(msgspec.Struct, tag=True, frozen=True):
    """All frames have arrived. ``damaged`` counts undecodable packets and truncations of the container."""

    decoded: int
    dropped: int
    damaged: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The process gives up, with the reason as text."""

    failure: Failure
    message: str


from_owner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(StreamSettings | RingMemory)
from_worker: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Ready | Opened | Arrived | Ended | Failed)
