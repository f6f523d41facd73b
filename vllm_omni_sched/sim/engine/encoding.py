"""Decide which items are encoded in a step, and keep the encoder cache."""

from vllm_omni_sched.items.ahead import AheadLedger, EncodeState
from vllm_omni_sched.resource.encoder_budget import EncoderBudgetPlan
from vllm_omni_sched.resource.worth import WorthIndex
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.policies import EnginePolicies
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.work import Item


class Encoding:
    """The encoder cache, and the encoder's part of the step that is being planned.

    1. A content is encoded once while it is in the cache, for all requests.
    2. A step encodes at most its budget, and each item whole.
    3. Items that a running request needs stay; the others are evicted in the order of `WorthIndex` when room is needed.
    4. Items that the lane has ready are moved into the cache, and not encoded.

    ``step``: by modality, items and embeddings that this step encodes.
    """

    def __init__(self, limits: EngineLimits, policies: EnginePolicies) -> None:
        self._limits, self._policies = limits, policies
        self._ledger: AheadLedger | None = policies.ledger
        self._index = WorthIndex(policies.config.encoder_cache_order, half_life_seconds=30.0)
        self._embeds: dict[str, int] = {}
        self._used = 0
        self._left = 0
        self._parts: dict[str, int] = {}
        self.step: dict[str, list[int]] = {}
        self.hits = 0
        self.encoded = 0

    def begin(self, plan: EncoderBudgetPlan | None = None) -> None:
        """Begin to plan a step; ``plan``: its budget, if a policy makes it."""
        self.step = {}
        self._left = self._limits.encoder_budget_embeds if plan is None else plan.embeds
        self._parts = {} if plan is None or len(plan.shares) < 2 else {s.modality: s.embeds for s in plan.shares}

    def has(self, item: Item) -> bool:
        """Return whether the item is in the cache, or ready in the lane."""
        content = str(item.content)
        return content in self._embeds or self.is_ready(content)

    def is_ready(self, content: str) -> bool:
        """Return whether the lane has encoded it."""
        return self._ledger is not None and self._ledger.state(content) is EncodeState.READY

    def take(self, sequence: Sequence, item: Item, now: float) -> bool:
        """Return whether this step can compute the tokens of an item; if so, the sequence holds its encoding."""
        if not self._limits.encodes or item.content in sequence.held:
            return True
        content = str(item.content)
        if content in self._embeds:
            self._index.use(content, now)
            self.hits += 1
        elif not self._make(content, item, now):
            return False
        sequence.held.append(item.content)
        return True

    def _make(self, content: str, item: Item, now: float) -> bool:
        ready = self.is_ready(content)
        if not ready and not self._in_budget(item):
            return False
        if not self._room(item.embeds):
            return False
        seconds = self._policies.costs.encode_seconds(item.modality, item.embeds)
        self._index.add(content, max(item.embeds, 1), seconds, now)
        self._embeds[content] = item.embeds
        self._used += item.embeds
        if ready:
            assert self._ledger is not None
            self._ledger.load(content)
            return True
        self.encoded += 1
        self._left -= item.embeds
        if item.modality in self._parts:
            self._parts[item.modality] -= item.embeds
        counts = self.step.setdefault(item.modality, [0, 0])
        counts[0] += 1
        counts[1] += item.embeds
        return True

    def _in_budget(self, item: Item) -> bool:
        left = min(self._left, self._parts.get(item.modality, self._left))
        return item.embeds <= left

    def _room(self, embeds: int) -> bool:
        while self._used + embeds > self._limits.encoder_cache_embeds:
            victim = self._index.evict()
            if victim is None:
                return False
            self._used -= self._embeds.pop(victim.encoding.mm_hash)
        return True

    def release(self, sequence: Sequence, upto: int | None = None) -> None:
        """Release the first so many items of a sequence, which are computed, or all if it has ended."""
        if not sequence.held:
            return
        gone = {item.content for item in sequence.items[:upto]} - {
            item.content for item in (sequence.items[upto:] if upto is not None else ())
        }
        for content in [one for one in sequence.held if one in gone]:
            sequence.held.remove(content)
            self._index.release(str(content))

    def clear(self) -> None:
        """Empty the cache of an engine that died."""
        self._index = WorthIndex(self._policies.config.encoder_cache_order, half_life_seconds=30.0)
        self._embeds.clear()
        self._used = 0
