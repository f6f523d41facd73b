"""Messages between the owner of the preprocessing pool and its processes; memory files with values come beside them."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec


class Failure(str, Enum):
    """Why a process could not do a job."""

    INPUT = "input"
    UNSUPPORTED = "unsupported"
    MEMORY = "memory"
    INTERNAL = "internal"


class Work(msgspec.Struct, tag=True):
    """A job: the tree of its payload, whose memory file comes with it."""

    task: int
    tree: Any


class Done(msgspec.Struct, tag=True):
    """A job was done: the tree of the result, whose memory file comes with it, and the time that it took."""

    task: int
    tree: Any
    seconds: float


class Failed(msgspec.Struct, tag=True):
    """A job failed."""

    task: int
    failure: Failure
    text: str


from_owner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Work)
from_worker: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Done | Failed)
