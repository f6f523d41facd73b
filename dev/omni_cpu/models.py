"""The stages' models: two tiny Llamas of the same weights, and a vocoder without any.

- `Thinker` is a Llama; the runner hands its hidden states on by itself.
- `Talker` speaks as long as it is asked to, one code a step. Its first input is the mean of the hidden states of the
  thinker's prompt; each later one is its own last code plus the next hidden state of the thinker's answer, as long as
  there is one. So each row that crosses the edge changes what it says, whether rows come one by one or all at once.
- `Vocoder` turns each code and its hidden state into one frame of sound: the code itself, then what it was said with.
- `Mixer` does the same, and appends the codes of a second talker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm_omni.model_executor.models.output_templates import OmniOutput

FRAME_SAMPLES = 4


class Thinker(LlamaForCausalLM):
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_of_the_runner: Any,
    ) -> Any:
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)


class Talker(Thinker):
    has_preprocess = True

    def preprocess(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, **payload: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Make the input of a request's step for the runner; `payload` is what has come over the edge."""
        step = payload["_omni_num_computed_tokens"]
        if len(input_ids) != 1:
            raise ValueError(f"the talker goes one code a step, not {len(input_ids)}")
        if step == 0:
            embeds = payload["embed"]["prefill"].mean(dim=0, keepdim=True)
        else:
            embeds = self.embed_input_ids(input_ids)
            rows = payload["embed"].get("decode", ())
            row = step - payload["embed"].get("decode_token_start", 0)
            if 0 <= row < len(rows):
                embeds = embeds + rows[row]
        return input_ids, embeds, {}


class Vocoder(nn.Module):
    have_multimodal_outputs = True
    enable_update_additional_information = True  # so that each chunk's hidden states reach `forward`

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        seq_token_counts: Sequence[int] = (),
        model_intermediate_buffer: Sequence[dict[str, Any]] = (),
        **_of_the_runner: Any,
    ) -> OmniOutput:
        codes = input_ids[: sum(seq_token_counts)].split(list(seq_token_counts))
        payloads = model_intermediate_buffer
        sound = [frames(c, p["hidden_states"]["output"]) for c, p in zip(codes, payloads, strict=True)]
        return OmniOutput(text_hidden_states=None, multimodal_outputs={"model_outputs": sound})

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """vLLM takes nothing for a text model that lacks this and the next."""
        return torch.zeros(len(input_ids), 1)

    def compute_logits(self, hidden_states: torch.Tensor) -> None:
        return None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()


class Mixer(Vocoder):
    """Adds the codes of a second talker to the sound of the first one's."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        seq_token_counts: Sequence[int] = (),
        model_intermediate_buffer: Sequence[dict[str, Any]] = (),
        **of_the_runner: Any,
    ) -> OmniOutput:
        payloads = model_intermediate_buffer
        plain = super().forward(
            input_ids,
            positions,
            seq_token_counts=seq_token_counts,
            model_intermediate_buffer=payloads,
            **of_the_runner,
        )
        sound = plain.multimodal_outputs["model_outputs"]
        mixed = [torch.cat([one, p["codes"]["ref"].float()]) for one, p in zip(sound, payloads, strict=True)]
        return OmniOutput(text_hidden_states=None, multimodal_outputs={"model_outputs": mixed})


def frames(codes: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    if len(codes) != len(hidden_states):
        raise ValueError(f"{len(codes)} codes came with {len(hidden_states)} hidden states")
    return torch.cat([codes.float()[:, None], hidden_states[:, : FRAME_SAMPLES - 1]], dim=1).flatten()
