"""Decide whether an engine may encode ahead of its steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LaneFacts:
    """Facts about an engine that decide whether it may have an encoder lane; the defaults allow one.

    ``workers``: processes that run the model together (vLLM's ``world_size``). ``device``: its type, as vLLM names it.
    ``vllm``: the version, for messages.
    """

    multimodal: bool = True
    workers: int = 1
    device: str = "cuda"
    vllm: str = ""
    connectors_hold_back: bool = True
    runner_runs_connectors: bool = True
    compiled_encoder: bool = False
    other_connector: bool = False
    speculates: bool = False
    lora: bool = False
    encoder_decoder: bool = False
    weights_change: bool = False


def refusal(facts: LaneFacts) -> str | None:
    """Return why ``encode_ahead`` is refused for such an engine, in one sentence with the fix; None if it is not.

    1. A model without multimodal items has no use for it: the option has no effect, and nothing is refused.
    2. Otherwise the first reason that holds is returned.
    """
    if not facts.multimodal:
        return None
    reasons = {
        f"connectors of vLLM {facts.vllm} cannot hold requests back": not facts.connectors_hold_back,
        f"model runner V2 of vLLM {facts.vllm} does not run connectors in every step": not facts.runner_runs_connectors,
        f"the device {facts.device!r} is not supported": facts.device not in ("cpu", "cuda"),
        "a compiled encoder (compile_mm_encoder) cannot yield to decode steps": facts.compiled_encoder,
        "--ec-transfer-config names another connector": facts.other_connector,
        "several workers would have to encode together": facts.workers > 1,
        "it is not supported together with speculative decoding": facts.speculates,
        "the encoder may have LoRA weights": facts.lora,
        "this is an encoder-decoder model": facts.encoder_decoder,
        "the weights may change while the lane encodes": facts.weights_change,
    }
    for reason, holds in reasons.items():
        if holds:
            return f"option 'encode_ahead' cannot be on here, because {reason}: set it to false"
    return None
