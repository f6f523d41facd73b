"""Payloads of vLLM-Omni as messages, and back as the same dicts that its own serializer gives."""

from __future__ import annotations

from typing import Any

from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.framing import REVIVE, Arrival, Message, make_message


def pack(edge: Edge, key: str, payload: Any) -> Message:
    """Take a payload apart.

    Raises:
        PayloadError: something in it cannot be sent.
    """
    message = make_message(edge, key, payload, fallback=OmniSerializer.encoder._enc_hook)
    if _may_hold_outputs(message.body):
        message.flags |= REVIVE
    return message


def unpack(arrival: Arrival) -> Any:
    """The payload; its tensors may be views of the message.

    Raises:
        CorruptMessageError: it is damaged.
    """
    return arrival.open(OmniSerializer.decoder._post_process)


def _may_hold_outputs(body: bytes) -> bool:
    """Whether it has the keys of dicts of which vLLM-Omni's serializer makes outputs again (CompletionOutput, …)."""
    if b"finish" not in body:
        return False
    if b"finished" in body and (b"final_output_type" in body or b"images" in body):
        return True
    return b"token_ids" in body and b"finish_reason" in body
