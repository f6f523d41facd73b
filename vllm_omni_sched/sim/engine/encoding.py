"""Model the encoder of an engine: its cache, and the items that a step encodes."""

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import PromptItem
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.sequence import Sequence


class Encoding:
    """The encoder cache, and the encoder's part of the step that is being planned.

    1. A content is encoded once while it is in the cache, for all requests.
    2. A step encodes at most its budget, and each item whole.
    3. Items that a running request needs stay; of the others, the one that has been unused
       for longest is evicted when room is needed.
    4. Items that the lane has ready are moved into the cache, and not encoded.

    ``step``: by modality, items and embeddings that this step encodes. ``left``: embeddings that it may still encode.
    ``has``: whether a content is in the cache.
    """

    def __init__(self, limits: EngineLimits, core: EngineCore) -> None:
        self._limits, self._core = limits, core
        self._ahead = core.ahead
        self._embeds: dict[str, int] = {}
        self._freeable: dict[str, None] = {}  # contents that nobody holds, in the order of becoming so
        self.has = self._embeds.__contains__
        self._used = 0
        self._holders: dict[str, int] = {}  # content -> sequences that hold its encoding
        self._held = 0  # embeddings that are held
        self.left = 0
        self.step: dict[str, list[int]] = {}
        self.hits = 0
        self.encoded = 0

    @property
    def free_embeds(self) -> int:
        """Return the room after all possible evictions."""
        return self._limits.encoder_cache_embeds - self._held

    def begin(self, embeds: int | None = None) -> None:
        """Begin to plan a step that may encode so many embeddings; None for the engine's own limit."""
        self.step = {}
        self.left = self._limits.encoder_budget_embeds if embeds is None else embeds

    def take(self, sequence: Sequence, item: PromptItem, now: float) -> bool:
        """Return whether this step can compute the tokens of an item; if so, the sequence holds its encoding."""
        content = item.content
        if not self._limits.encodes or content in sequence.held:
            return True
        if content in self._embeds:
            self._freeable.pop(content, None)
            self.hits += 1
        elif not self._make(item, now):
            return False
        sequence.held.append(content)
        holders = self._holders.get(content, 0)
        self._holders[content] = holders + 1
        if not holders:
            self._held += self._embeds[content]
        return True

    def _make(self, item: PromptItem, now: float) -> bool:
        content, modality, embeds = item.content, item.modality, item.embeds
        ready = self._ahead is not None and self._ahead.is_ready(content)
        if not ready and embeds > self.left:
            return False
        if not self._room(embeds):
            return False
        self._embeds[content] = embeds
        self._used += embeds
        if ready:
            assert self._ahead is not None
            self._ahead.load(content, now)
            return True
        self.encoded += 1
        self.left -= embeds
        counts = self.step.setdefault(modality, [0, 0])
        counts[0] += 1
        counts[1] += embeds
        return True

    def _room(self, embeds: int) -> bool:
        while self._used + embeds > self._limits.encoder_cache_embeds:
            victim = next(iter(self._freeable), None)
            if victim is None:
                return False
            del self._freeable[victim]
            self._used -= self._embeds.pop(victim)
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
            holders = self._holders.pop(content) - 1
            if holders:
                self._holders[content] = holders
            else:
                self._held -= self._embeds[content]
                self._freeable[content] = None

    def clear(self) -> None:
        """Empty the cache of an engine that died."""
        self._embeds.clear()
        self._freeable.clear()
        self._holders.clear()
        self._used = self._held = 0
