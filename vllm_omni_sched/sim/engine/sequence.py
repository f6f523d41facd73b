"""A request in the engine."""

from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Item


class Sequence:
    """A request in the engine, from its first wait to its last token.

    ``prompt``: tokens that are to be computed before the next one is made: after a preemption also those it has made
    already. ``computed``: of these. ``starts``: where each item begins in the prompt. ``made``: output tokens.
    ``next_item``: the first item that is not computed. ``held``: content of the items that it holds in the encoder
    cache. ``ahead``: whether items of it went to the lane; ``limit``: where the first one begins that is not back.
    ``last_token``: when it got the last one; ``first_step``: the first in which it decodes since.
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
        """The items that the next so many tokens of its prompt need, and that are not computed whole yet."""
        first = last = self.next_item
        until = self.computed + tokens
        while last < len(self.starts) and self.starts[last] < until:
            last += 1
        return range(first, last)

    def restart(self) -> None:
        """It lost its place: what it had, with the tokens it has made, is to be computed again."""
        self.prompt = self._own + self.made
        self.computed = 0
        self.next_item = 0
