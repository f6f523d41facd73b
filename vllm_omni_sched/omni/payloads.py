"""Payloads of vLLM-Omni as messages, and back as the same dicts that its own serializer gives."""

from __future__ import annotations

from typing import Any

from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.framing import REVIVE, Arrival, Message, make_message

_OUTPUTS = ((b"final_output_type", b"finished"), (b"images", b"finished"), (b"token_ids", b"finish_reason"))
"""Keys of dicts of which vLLM-Omni's serializer makes outputs again (OmniRequestOutput, CompletionOutput, …)."""


def pack(edge: Edge, key: str, payload: Any) -> Message:
    """Take a payload apart.

    Raises:
        PayloadError: something in it cannot be sent.
    """
    message = make_message(edge, key, payload, fallback=OmniSerializer.encoder._enc_hook)
    if any(all(word in message.body for word in words) for words in _OUTPUTS):
        message.flags |= REVIVE
    return message


def unpack(arrival: Arrival) -> Any:
    """The payload; its tensors may be views of the message.

    Raises:
        CorruptMessageError: it is damaged.
    """
    return arrival.open(OmniSerializer.decoder._post_process)
