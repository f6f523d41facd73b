"""Define the sizes of an engine at start."""

from dataclasses import dataclass

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import EngineFacts, LendingFacts


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of one engine, with vLLM's names where it has them.

    ``encoder_budget_embeds``, ``encoder_cache_embeds``: of a step, and of the encoder cache; an item that is larger
    is refused. ``encodes``: whether it has the encoder; else items come encoded. ``lane_items``: items that the lane
    encodes at a time. ``paced``: whether the lane needs processors that decode steps leave it, as on a CPU;
    ``lane_beside``: whether it also has some of its own. ``reserve_embeds``: embeddings whose activations fit into
    the memory set aside, None for the encoder budget; ``embeds_per_token``: those that fit into the KV memory of a
    token.
    """

    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    encoder_budget_embeds: int = 8192
    encoder_cache_embeds: int = 8192
    encodes: bool = True
    lane_items: int = 1
    paced: bool = False
    lane_beside: bool = True
    reserve_embeds: int | None = None
    embeds_per_token: float = 0.0

    @property
    def item_embeds(self) -> int:
        """Return the embeddings of the largest item that the engine accepts."""
        return min(self.encoder_budget_embeds, self.encoder_cache_embeds)

    @property
    def lending(self) -> LendingFacts | None:
        """Return the memory that may be lent, in blocks of one token; None if its size is not known."""
        if not self.embeds_per_token:
            return None
        reserve = self.encoder_budget_embeds if self.reserve_embeds is None else self.reserve_embeds
        return LendingFacts(self.kv_tokens, 1, reserve, self.embeds_per_token, 1)


def make_core(config: OmniSchedConfig, limits: EngineLimits, history: int = 0) -> EngineCore:
    """Return the core of an engine with these options and sizes; ``history``: transitions that it keeps."""
    facts = EngineFacts(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.encoder_budget_embeds,
        limits.encoder_cache_embeds,
        limits.encodes,
        limits.paced,
        lending=limits.lending,
    )
    core = EngineCore(config, facts, history=history)
    if core.ahead is not None:
        core.ahead.lane_is(limits.lane_items, own_processors=limits.lane_beside)
    return core
