"""What the owner of a stream and its process tell each other."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_omni_sched.video.messages import Failure


class Settings(msgspec.Struct, tag=True, frozen=True):
    """How to decode; the first message to the process.

    Attributes:
        slots: of the ring.
        drop: frames for which there is no slot are left out, not waited with.
    """

    every: int
    fps: float | None
    slots: int
    drop: bool
    max_pixels: int


class Room(msgspec.Struct, tag=True, frozen=True):
    """Where frames go. Descriptors: the ring's memory, and an event that is set when a slot is free again."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The process is locked in; which parts of that this system does not have."""

    missing: tuple[str, ...]


class Opened(msgspec.Struct, tag=True, frozen=True):
    """What the stream is; `Room` is awaited. Pixels of frames after rotation."""

    codec: str
    width: int
    height: int


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """A frame is in its slot."""

    slot: int
    number: int
    pts_seconds: float


class Ended(msgspec.Struct, tag=True, frozen=True):
    """All frames have arrived. ``damaged``: packets that could not be decoded, and a container that broke off."""

    decoded: int
    dropped: int
    damaged: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Nothing more will come, and why, for people."""

    failure: Failure
    message: str


to_process: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Settings | Room)
to_owner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Ready | Opened | Arrived | Ended | Failed)
