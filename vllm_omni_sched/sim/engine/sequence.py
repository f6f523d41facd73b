"""Represent a request in the engine."""

from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Item


class Sequence:
    """A request in the engine, from its first wait to its last token.

    ``prompt``: tokens to compute before the next one is made; after a preemption including the output tokens made
    already. ``computed``: of these. ``starts``: where each item begins in the prompt. ``made``: output tokens.
    ``next_item``: the first item that is not computed. ``held``: content of the items that it holds in the encoder
    cache. ``ahead``: whether items of it went to the lane; ``limit``: start of the first item that is not back.
    ``last_token``: time of the last one; ``first_step``: the first step in which it decodes since.
    """

    __slots__ = (
        "_own",
        "ahead",
        "computed",
        "entered",
        "first_step",
        "held",
        "items",
        "job",
        "largest_gap",
        "last_token",
        "limit",
        "made",
        "name",
        "next_item",
        "output_tokens",
        "prompt",
        "sla",
        "starts",
    )

    def __init__(self, job: Job, sla: SlaClass, entered: float) -> None:
        request = job.request
        self.job = job
        self.name = request.name
        self.sla = sla
        self.entered = entered
        self.items: tuple[Item, ...] = request.items
        self.starts: list[int] = []
        at = 0
        for item in self.items:
            self.starts.append(at)
            at += item.embeds
        self._own = self.prompt = max(at + request.text_tokens, 1)
        self.output_tokens = request.output_tokens
        self.computed = 0
        self.made = 0
        self.next_item = 0
        self.held: list[int] = []
        self.ahead = False
        self.limit: int | None = None
        self.last_token: float | None = None
        self.first_step = 0
        self.largest_gap = 0.0

    def window(self, tokens: int) -> range:
        """Return the items that the next so many tokens of its prompt need, without those that are computed."""
        first = last = self.next_item
        until = self.computed + tokens
        while last < len(self.starts) and self.starts[last] < until:
            last += 1
        return range(first, last)

    def restart(self) -> None:
        """Reset a preempted sequence: its prompt and output tokens are to be computed again."""
        self.prompt = self._own + self.made
        self.computed = 0
        self.next_item = 0
