"""Represent a request in the engine."""

from collections.abc import Sequence as Many

from vllm_omni_sched.core.engine.requests import PromptItem
from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.sim.server import Job


class Sequence:
    """Follows a request in the engine, from its first wait to its last token.

    ``prompt``: tokens to compute before the next one is made; after a preemption including the output tokens made
    already. ``computed``: of these. ``made``: output tokens. ``runs``: whether it was admitted. ``next_item``: the
    first item that is not computed. ``held``: content of the items that it holds in the encoder cache. ``last_token``:
    time of the last one; ``first_step``: the first step in which it decodes since. ``blocks``: hash ids of its prompt,
    of ``block_tokens`` each, of which it holds the first ``held_blocks`` in the prefix cache. ``remote``: whether
    another engine has its KV cache. ``growth``: tokens that it makes in a decode step, on average.
    """

    __slots__ = (
        "_own",
        "block_tokens",
        "blocks",
        "computed",
        "entered",
        "first_step",
        "growth",
        "held",
        "held_blocks",
        "items",
        "job",
        "largest_gap",
        "last_token",
        "made",
        "next_item",
        "output_tokens",
        "prompt",
        "remote",
        "request_id",
        "runs",
        "sla",
    )

    def __init__(self, job: Job, sla: SlaClass, entered: float) -> None:
        request = job.request
        self.job = job
        self.request_id = request.name
        self.sla = sla
        self.entered = entered
        items, at = [], 0
        for item in request.items:
            items.append(PromptItem(str(item.content), item.modality, item.embeds, at))
            at += item.embeds
        self.items: tuple[PromptItem, ...] = tuple(items)
        self._own = self.prompt = max(at + request.text_tokens, 1)
        self.output_tokens = request.output_tokens
        self.computed = 0
        self.made = 0
        self.next_item = 0
        self.held: list[str] = []
        self.blocks, self.block_tokens, self.held_blocks = request.blocks, request.block_tokens, 0
        self.runs = False
        self.remote = False
        self.growth = 1.0
        self.last_token: float | None = None
        self.first_step = 0
        self.largest_gap = 0.0

    is_session = False

    @property
    def has_items(self) -> bool:
        """Return whether it has any item."""
        return bool(self.items)

    @property
    def left(self) -> int:
        """Return the tokens of its prompt still to compute."""
        return self.prompt - self.computed

    def items_within(self, start: int, tokens: int) -> Many[PromptItem]:
        """Return the items that ``tokens`` from ``start`` need, without those that are computed."""
        items, first = self.items, self.next_item
        until, last = start + tokens, first
        while last < len(items) and items[last].start < until:
            last += 1
        return items[first:last]

    def begin_at(self, tokens: int) -> int:
        """Begin behind so many tokens that are computed already, but before an item that they end in; return how many.

        Items before that are not encoded again.
        """
        items, at = self.items, 0
        while at < len(items) and items[at].start + items[at].embeds <= tokens:
            at += 1
        if at < len(items) and items[at].start < tokens:
            tokens = items[at].start
        self.next_item, self.computed = at, tokens
        return tokens

    def restart(self) -> None:
        """Reset a preempted sequence: its prompt and output tokens are to be computed again."""
        self.prompt = self._own + self.made
        if self.growth != 1.0 and self.made:  # the first token is from its prompt, the others from decode steps
            self.prompt = self._own + 1 + int(self.growth * (self.made - 1))
        self.computed = 0
        self.next_item = 0
        self.runs = False
