"""Decide whether an engine may share its encodings with other engines of its host."""

from vllm_omni_sched.resource.engine.lane import LaneFacts

OPTION = "encoder_share_bytes"


def share_refusal(facts: LaneFacts, operators: str | None) -> str | None:
    """Return why ``encoder_share_bytes`` is refused for such an engine, with the fix; None if it is not refused.

    1. A model without multimodal items has no use for it: the option has no effect, and nothing is refused.
    2. Otherwise the first reason that holds is returned.

    Args:
        facts: about the engine.
        operators: name of an EC connector that the operator has chosen, if any.
    """
    if not facts.multimodal:
        return None
    reasons = {
        f"connectors of vLLM {facts.vllm} cannot hold requests back": not facts.connectors_hold_back,
        f"model runner V2 of vLLM {facts.vllm} does not run connectors in every step": not facts.runner_runs_connectors,
        f"--ec-transfer-config names {operators}, and encodings have one store": operators is not None,
        "its workers may be on several hosts, where they do not see one folder": facts.workers > 1 and facts.spread,
        "of several pipeline stages or context-parallel groups, only the first has the encoder": facts.groups > 1,
        "two engines may have different adapters of the encoder under one name "
        "(--enable-tower-connector-lora)": facts.encoder_lora,
        "this is an encoder-decoder model": facts.encoder_decoder,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return (
        None if why is None else f"option {OPTION!r} cannot be used here, because {why}: leave it out, or set it to 0"
    )
