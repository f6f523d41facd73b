"""What a message is made of, told by its longest buffer."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_omni_sched.connectors.arena.options import Modality, modality_of
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message

CASES: list[tuple[Any, Modality]] = [
    ({"text": "hello"}, Modality.TEXT),
    ({"ids": torch.arange(9)}, Modality.TEXT),
    ({"ids": np.arange(9, dtype=np.int32)}, Modality.TEXT),
    ({"mask": torch.ones(3, dtype=torch.bool)}, Modality.TEXT),
    ({"empty": torch.ones(0, 3)}, Modality.TEXT),
    ({"pcm": np.zeros(9, np.int16)}, Modality.AUDIO),
    ({"pcm": np.zeros((2, 9), np.int16)}, Modality.AUDIO),
    ({"wave": torch.zeros(9)}, Modality.AUDIO),
    ({"wave": torch.zeros(9, dtype=torch.bfloat16)}, Modality.AUDIO),
    ({"hidden": torch.zeros(9, 9)}, Modality.IMAGE),
    ({"pixels": np.zeros((9, 9, 3), np.uint8)}, Modality.IMAGE),
    (b"bytes", Modality.IMAGE),
    ({"ids": torch.arange(3), "wave": torch.zeros(100)}, Modality.AUDIO),
    ({"ids": torch.arange(100), "wave": torch.zeros(3)}, Modality.TEXT),
]


@pytest.mark.parametrize(("payload", "modality"), CASES, ids=range(len(CASES)))
def test_the_longest_buffer_tells(payload: Any, modality: Modality) -> None:
    assert modality_of(make_message(Edge("0", "1"), "k", payload)) is modality
