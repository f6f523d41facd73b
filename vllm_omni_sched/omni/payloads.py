"""Convert payloads of vLLM-Omni to messages, and back to the dicts that its own serializer returns."""

from __future__ import annotations

from typing import Any

from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import REVIVE, Arrival, Message, make_message


def pack(edge: Edge, key: str, payload: Any) -> Message:
    """Convert a payload to a message.

    Raises:
        PayloadError: a part of it cannot be sent.
    """
    message = make_message(edge, key, payload, fallback=OmniSerializer.encoder._enc_hook)
    if _may_hold_outputs(message.body):
        message.flags |= REVIVE
    return message


def unpack(arrival: Arrival) -> Any:
    """Return the payload of a message; its tensors may be views of the message.

    Raises:
        CorruptMessageError: the message is damaged.
    """
    return arrival.open(OmniSerializer.decoder._post_process)


def _may_hold_outputs(body: bytes) -> bool:
    """Return whether it has the keys of dicts that vLLM-Omni's serializer turns into outputs (CompletionOutput, …)."""
    if b"finish" not in body:
        return False
    if b"finished" in body and (b"final_output_type" in body or b"images" in body):
        return True
    return b"token_ids" in body and b"finish_reason" in body
