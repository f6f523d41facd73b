"""Messages for files, and messages of what has arrived."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, make_message, message_of


@pytest.mark.parametrize(
    "payload",
    [
        {"a": np.arange(7), "b": [np.zeros((0, 3)), np.ones(300_000, np.float32), np.float32(2)], "c": "text"},
        {"t": torch.arange(12).view(3, 4).t(), "u": torch.ones(3, dtype=torch.bfloat16), "v": torch.tensor(5)},
        {"s": np.arange(100)[::3], "d": np.array(["2020-01-01"], "M8[D]"), "e": np.zeros(0), "z": torch.zeros(0)},
        b"some bytes",
        None,
    ],
    ids=range(5),
)
def test_pieces_are_what_is_written(payload: Any) -> None:
    message = make_message(Edge("0", "1"), "k", payload)
    pieces = b"".join(bytes(memoryview(piece)) for piece in message.pieces())
    assert pieces == message.to_buffer()
    assert len(pieces) == message.nbytes
    arrival = Arrival(pieces, message.name)
    again = message_of(arrival, Edge("0", "1"), "k")
    assert again.flags == message.flags
    assert again.to_buffer() == pieces
