"""Fit a profile to an engine: leave out what this engine cannot do, with the reason."""

from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.config.options import EvictionOrder, OmniSchedConfig
from vllm_omni_sched.resource.engine.lane import LaneFacts, obstacle


@dataclass(frozen=True)
class Withheld:
    """An option that a profile sets, but that stays off in this engine, with the reason and what is on instead."""

    option: str
    reason: str
    instead: str = ""

    def __str__(self) -> str:
        instead = f"; {self.instead} is on instead" if self.instead else ""
        return f"{self.option} stays off, because {self.reason}{instead}"


@dataclass(frozen=True)
class Fitted:
    """The options of an engine, and those options of its profile that it cannot have."""

    config: OmniSchedConfig
    withheld: tuple[Withheld, ...] = ()


def fit_profile(config: OmniSchedConfig, facts: LaneFacts) -> Fitted:
    """Return the options that an engine with these ``facts`` runs under.

    1. What the operator set is kept: an engine that cannot have it refuses to start.
    2. ``encode_ahead`` of a profile is off where the engine cannot have a lane. ``encode_rounds`` is on in its place,
       unless the operator set that option or the model is an encoder-decoder.
    3. ``encoder_cache_order`` of a profile is vLLM's for an encoder-decoder model, whose cache is not an LRU cache.
    """
    chosen, withheld = config.from_profile(), []
    changes: dict[str, Any] = {}
    if chosen.get("encode_ahead") and facts.multimodal and (why := obstacle(facts)) is not None:
        rounds = "encode_rounds" not in config.given and not facts.encoder_decoder
        changes = {"encode_ahead": False, **({"encode_rounds": True} if rounds else {})}
        withheld.append(Withheld("encode_ahead", why.reason, "encode_rounds" if rounds else ""))
    if "encoder_cache_order" in chosen and facts.encoder_decoder:
        changes |= {"encoder_cache_order": EvictionOrder.AGE}
        withheld.append(Withheld("encoder_cache_order", "this is an encoder-decoder model"))
    return Fitted(config.model_copy(update=changes) if changes else config, tuple(withheld))
