"""What a payload looks like at its receiver: as if vLLM-Omni's own serializer had carried it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from PIL import Image
from vllm.outputs import CompletionOutput, RequestOutput
from vllm_omni.data_entry_keys import CodesStruct, HiddenStatesStruct, MetaStruct, OmniPayloadStruct
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from vllm_omni_sched.config.errors import PayloadError
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival
from vllm_omni_sched.omni.payloads import pack, unpack

pytestmark = pytest.mark.omni

EDGE = Edge("0", "1")


def outputs() -> RequestOutput:
    completion = CompletionOutput(0, "ab", [1, 2], cumulative_logprob=-1.5, logprobs=None, finish_reason="stop")
    completion.multimodal_output = {"audio": torch.arange(5.0)}
    return RequestOutput("r-1", "p", [3, 4], None, [completion], finished=True)


PAYLOADS: dict[str, Any] = {
    "end of a stream": OmniPayloadStruct(meta=MetaStruct(finished=torch.tensor(True))),
    "codes": OmniPayloadStruct(codes=CodesStruct(audio=torch.arange(32).reshape(2, 16)), meta=MetaStruct()),
    "hidden states": OmniPayloadStruct(
        hidden_states=HiddenStatesStruct(output=torch.randn(7, 8, dtype=torch.bfloat16))
    ),
    "plain": {"ids": [1, -2, 3 << 40], "text": "ä", "none": None, "deep": {"x": [1.5, True, b"\x00\xff"]}, "t": (1, 2)},
    "tensors": {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "turned": torch.arange(12.0).reshape(3, 4).T,
        "half": torch.ones(3, dtype=torch.float16),
        "flag": torch.tensor([True, False]),
    },
    "arrays": {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "s": np.array(["x", "yz"])},
    "a picture": {"image": Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))},
    "an output": {"request": outputs()},
    "ids alone": [5, 6, 7],
}


def carried(payload: Any) -> Any:
    return unpack(Arrival(pack(EDGE, "k", payload).to_buffer()))


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_arrives_as_over_vllm_omnis_own_connector(name: str) -> None:
    theirs = OmniSerializer.deserialize(OmniSerializer.serialize(PAYLOADS[name]))
    assert_same(carried(PAYLOADS[name]), theirs, name)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(PayloadError, match="object"):
        pack(EDGE, "k", {"x": object()})


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, where
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, Image.Image):
        assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes()), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}[{place}]")
    elif hasattr(theirs, "__dict__"):
        assert_same(vars(ours), vars(theirs), where)
    else:
        assert ours == theirs, where
