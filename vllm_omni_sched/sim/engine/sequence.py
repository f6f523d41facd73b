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
    time of the last one; ``first_step``: the first step in which it decodes since.
    """

    __slots__ = (
        "_own",
        "computed",
        "entered",
        "first_step",
        "held",
        "items",
        "job",
        "largest_gap",
        "last_token",
        "made",
        "next_item",
        "output_tokens",
        "prompt",
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
        self.runs = False
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

    def restart(self) -> None:
        """Reset a preempted sequence: its prompt and output tokens are to be computed again."""
        self.prompt = self._own + self.made
        self.computed = 0
        self.next_item = 0
        self.runs = False
