"""What crosses an edge: called by vLLM-Omni by dotted name.

Three functions an edge: `…_chunk` builds the payload of one step (async-chunk mode; in the engine core),
`…_payload` that of a whole request (full-payload mode; in the worker), and `…_prompt` the prompt with which
vLLM-Omni's front end sends the request on in full-payload mode. In async-chunk mode the front end makes up a prompt
by itself, of one token for models it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm_omni.data_entry_keys import (
    CodesStruct,
    EmbeddingsStruct,
    HiddenStatesStruct,
    OmniPayloadStruct,
)
from vllm_omni.inputs.data import OmniTokensPrompt

CHUNK_FRAMES = 4


def thinker2talker_prompt(source_outputs: Sequence[Any], *_: Any) -> list[OmniTokensPrompt]:
    return [OmniTokensPrompt(prompt_token_ids=[0]) for _ in source_outputs]


def thinker2talker_payload(
    transfer_manager: Any, pooling_output: dict[str, Any], request: Any
) -> dict[str, dict[str, Any]]:
    hidden = pooling_output["hidden"]
    prompt_len = len(request.prompt_token_ids)
    return {
        "embed": {"prefill": hidden[:prompt_len], "decode": hidden[prompt_len:], "decode_token_start": 1},
    }


def thinker2talker_chunk(
    transfer_manager: Any, multimodal_output: dict[str, Any] | None, request: Any, is_finished: bool = False
) -> OmniPayloadStruct | None:
    if multimodal_output is None:
        return None
    hidden = multimodal_output["hidden"]
    # rows before this step's, and those of the prompt, which may take several steps
    state = transfer_manager.request_payload.setdefault(request.external_req_id, {"rows": 0, "prompt": []})
    start = state["rows"]
    state["rows"] += len(hidden)
    if start < request.num_prompt_tokens:
        state["prompt"].append(hidden)
        if state["rows"] < request.num_prompt_tokens:
            return None
        return OmniPayloadStruct(embed=EmbeddingsStruct(prefill=torch.cat(state["prompt"])))
    step = start - request.num_prompt_tokens + 1
    return OmniPayloadStruct(embed=EmbeddingsStruct(decode=hidden, decode_token_start=step))


def talker2vocoder_prompt(source_outputs: Sequence[Any], *_: Any) -> list[OmniTokensPrompt]:
    counts = [len(output.outputs[0].cumulative_token_ids) for output in source_outputs]
    return [OmniTokensPrompt(prompt_token_ids=[0] * count) for count in counts]


def talker2vocoder_payload(
    transfer_manager: Any, pooling_output: dict[str, Any], request: Any
) -> dict[str, dict[str, Any]]:
    return {
        "codes": {"audio": torch.tensor(list(request.output_token_ids))},
        "hidden_states": {"output": pooling_output["hidden"]},
    }


def talker2vocoder_chunk(
    transfer_manager: Any,
    multimodal_output: dict[str, Any] | None,
    request: Any,
    is_finished: bool = False,
    new_token_ids: Sequence[int] = (),
) -> OmniPayloadStruct | None:
    if multimodal_output is None:
        return None
    said = transfer_manager.request_payload.setdefault(request.external_req_id, {"codes": [], "hidden": []})
    said["codes"].extend(new_token_ids)
    said["hidden"].append(multimodal_output["hidden"])
    if len(said["codes"]) < CHUNK_FRAMES and not is_finished:
        return None
    del transfer_manager.request_payload[request.external_req_id]
    return OmniPayloadStruct(
        codes=CodesStruct(audio=torch.tensor(said["codes"])),
        hidden_states=HiddenStatesStruct(output=torch.cat(said["hidden"])),
    )


def echo2mixer_payload(
    transfer_manager: Any, pooling_output: dict[str, Any], request: Any
) -> dict[str, dict[str, Any]]:
    return {"codes": {"ref": torch.tensor(list(request.output_token_ids))}}


def echo2mixer_chunk(
    transfer_manager: Any,
    multimodal_output: dict[str, Any] | None,
    request: Any,
    is_finished: bool = False,
    new_token_ids: Sequence[int] = (),
) -> OmniPayloadStruct | None:
    if not new_token_ids:
        return None
    return OmniPayloadStruct(codes=CodesStruct(ref=torch.tensor(list(new_token_ids))))


def talkers2mixer_prompt(source_outputs: Sequence[Any], *_: Any) -> list[OmniTokensPrompt]:
    """Return one prompt from the outputs of both talkers, the first of which says how long the sound is."""
    talker, _echo = source_outputs
    return [OmniTokensPrompt(prompt_token_ids=[0] * len(talker.outputs[0].cumulative_token_ids))]


def encoder2dit_prompt(source_outputs: Sequence[Any], *_: Any) -> OmniTokensPrompt:
    """Return all that is sent to the diffusion stage: no connector is between the two."""
    return OmniTokensPrompt(prompt_token_ids=list(source_outputs[0].outputs[0].cumulative_token_ids))
