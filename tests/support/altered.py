"""Memory, files and wires that alter what is written to them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from vllm_omni_sched.connectors.framing import Message


class Medium:
    """Alters a byte of the n-th buffer of each message that is written, after its checksum was made."""

    def __init__(self) -> None:
        self.alters: tuple[int, int] | None = None  # which buffer, which byte
        write_to, pieces = Message.write_to, Message.pieces

        def altered_write(message: Message, target: memoryview, address: int, *more: Any, **named: Any) -> None:
            write_to(message, target, address, *more, **named)
            if self.alters is not None and message.buffers:
                number, byte = self.alters
                where = ctypes.c_ubyte.from_address(address + message._places[number][0] + byte)
                where.value ^= 0x10

        def altered_pieces(message: Message, *more: Any, **named: Any) -> Iterator[Any]:
            at = 0
            for piece in pieces(message, *more, **named):
                flat = bytearray(piece)
                if self.alters is not None and message.buffers:
                    number, byte = self.alters
                    where = message._places[number][0] + byte - at
                    if 0 <= where < len(flat):
                        flat[where] ^= 0x10
                at += len(flat)
                yield bytes(flat)

        self.patches = [
            patch.object(Message, "write_to", altered_write),
            patch.object(Message, "pieces", altered_pieces),
        ]

    def __enter__(self) -> Medium:
        for one in self.patches:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()
