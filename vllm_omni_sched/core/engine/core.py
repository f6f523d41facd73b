"""Every scheduling decision of one engine, in one place."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.config.options import OmniSchedConfig, OrderMode
from vllm_omni_sched.core.engine.encode_ahead import EncodeAhead
from vllm_omni_sched.core.engine.encode_rounds import RoundScheduling
from vllm_omni_sched.core.engine.history import History, Transition
from vllm_omni_sched.core.engine.lending import KvLending
from vllm_omni_sched.core.engine.requests import EngineFacts, EngineView, PromptItem, RequestBook
from vllm_omni_sched.core.engine.step_limits import StepLimits
from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.promises import classes_of
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter


class StepPlan(NamedTuple):
    """Limits of a step.

    ``max_requests``: requests that may run. ``max_tokens``: of the step. ``longest``: prompt tokens of one request.
    ``encoder_embeds``: that the step may encode, None for the engine's own limit. ``aside``: waiting requests that
    rounds hold back.
    """

    max_requests: int
    max_tokens: int
    longest: int
    encoder_embeds: int | None = None
    aside: frozenset[str] = frozenset()


class EngineCore:
    """The state machine of one engine: a driver reports events, and carries out what is returned.

    ====================  ===============================================================================
    event                 method, and the actions that it returns
    ====================  ===============================================================================
    request enters        `enter`; `waiting_request` is its place in the waiting order
    step begins           `begin_step`: limits of the step, and waiting requests to set aside; before it, and
                          before `ahead.take_actions`, `lending.plan`: KV blocks to lend or to take back
    request may go next   `ahead.next_chunk`: run it or hold it back, items to encode ahead
    request is admitted   before: `lending.may_admit`: admit it beside the loan, or wait; after: `lending.admitted`
    chunk is planned      `ahead.cut`, `rounds.cut`: its tokens
    encoder makes room    `ahead.load`: take the encoding from the lane
    step is planned       `ahead.take_actions`: items for the lane, encodings to drop or load
    item is encoded       `ahead.encoded`, `ahead.failed`: requests to look at again, or to fail
    step has ended        `step_ended`
    request leaves        `leave`
    engine acts by itself `note`: for the history alone
    ====================  ===============================================================================

    1. A part that no option asks for is None, and its events need not be reported.
    2. There is no clock and no random number here: the same events in the same order get the same answers.
    3. An event costs O(log n) of the requests that wait and run, or what the driver's view costs if that is more.

    Args:
        metrics: counts of the decisions; its own if None.
        history: transitions that are kept for `story`, 0 for none; or where they go.
    """

    def __init__(
        self,
        config: OmniSchedConfig,
        facts: EngineFacts,
        metrics: SchedulerMetrics | None = None,
        history: int | History = 0,
    ) -> None:
        self.config = config
        self.metrics = SchedulerMetrics() if metrics is None else metrics
        self.history: History | None = history if isinstance(history, History) else None
        if isinstance(history, int) and history:
            self.history = History(history)
        self.classes = classes_of(config)
        self.book = RequestBook(self.classes[INTERACTIVE.name])
        self.costs = CostModel()
        self.steps = StepMeter()
        parts = self.costs, self.steps, self.metrics, self.history
        self.limits = StepLimits(config, facts, self.metrics)
        self.ahead = EncodeAhead(config, facts, *parts) if config.encode_ahead and facts.encodes else None
        self.rounds: RoundScheduling | None = None
        if config.encode_rounds and facts.encodes:
            self.rounds = RoundScheduling(config, facts, self.book, *parts)
        self.lending: KvLending | None = None
        if config.kv_lending and facts.lending is not None and facts.encodes:
            self.lending = KvLending(config, facts, facts.lending, self.ahead, self.costs, self.steps)
        by_sla = config.waiting_order is OrderMode.SLA
        self.order = WaitingOrder(config.max_wait_seconds) if by_sla else None

    @property
    def decides(self) -> bool:
        """Return whether any option asks for a decision."""
        return self.limits.any or any(one is not None for one in (self.ahead, self.rounds, self.order, self.lending))

    # -- a request's life ----------------------------------------------------

    def enter(
        self, request_id: str, sla: SlaClass, now: float, arrival: float | None = None, *, session: bool = False
    ) -> None:
        """Record a request that entered.

        Args:
            arrival: when it was sent, if earlier than ``now``.
            session: whether it is continued with streaming input.

        Raises:
            RequestError: it is a session, and the engine lends KV blocks (`KvLending`).
        """
        if session and self.lending is not None:
            raise RequestError(
                "an engine with option 'kv_lending' takes no streaming input, as a session keeps its KV blocks while "
                "it waits: send it as one whole request, or to an engine without 'kv_lending'"
            )
        self.book.enter(request_id, sla, now if arrival is None else arrival)
        if self.history is not None:
            self.history.add(now, Transition.ENTERED, request_id, sla.name)

    def leave(self, request_id: str, tokens: int, now: float, how: str = "") -> None:
        """Drop a request that ended with so many output tokens; 0 for one that was withdrawn. ``how``: it ended."""
        self.book.leave(request_id)
        if self.ahead is not None:
            self.ahead.leave(request_id)
        if self.rounds is not None:
            self.rounds.leave(request_id, tokens)
        if self.lending is not None and not len(self.book):
            self.lending.emptied()
        if self.history is not None:
            self.history.add(now, Transition.LEFT, request_id, how)

    def note(self, transition: Transition, request_id: str, now: float, detail: str = "") -> None:
        """Add what the engine did with a request to its history; nothing is decided."""
        if self.history is not None:
            self.history.add(now, transition, request_id, detail)

    def reset(self, now: float) -> None:
        """Drop all requests, after the engine has lost them; what was learnt is kept."""
        for request_id in self.book.request_ids():
            self.leave(request_id, 0, now)
        if self.rounds is not None:
            self.rounds.forget()
        if self.lending is not None:
            self.lending.forget()

    def waiting_request(
        self,
        request_id: str,
        computed: int,
        left: int,
        items: Sequence[PromptItem],
        num_items: int,
        now: float,
        priority: int = 0,
    ) -> WaitingRequest:
        """Return a request as the waiting order sees it.

        ``computed``, ``left``: tokens in its KV cache, and those of its prompt still to compute. ``items``: the first
        `graph.affinity.AFFINITY_ITEMS` of its ``num_items`` items. Those that the lane has encoded cost nothing more:
        otherwise the request would count as late although only its prefill is left.
        """
        costs = self.costs
        cost = costs.prefill_seconds(max(left, 0))
        if items and not computed:
            # a session may have thousands of items: the cost of all is estimated from the first few
            left_to_encode = items if self.ahead is None else [i for i in items if not self.ahead.is_ready(i.content)]
            each = sum(costs.encode_seconds(item.modality, item.embeds) for item in left_to_encode)
            cost += each * num_items / len(items)
        return WaitingRequest(
            request_id,
            self.book.arrival(request_id, now),
            self.book.sla(request_id),
            cost,
            items[0].modality if items else "text",
            frozenset(item.content for item in items),
            priority,
            holds_memory=computed > 0,
        )

    # -- a step --------------------------------------------------------------

    def begin_step(self, view: EngineView, max_requests: int, max_tokens: int, now: float) -> StepPlan:
        """Return the limits of the next step, within those of the engine."""
        limits = self.limits
        decoding = view.decode_tokens
        lending = self.lending
        if self.rounds is None and not limits.any and lending is None:
            return StepPlan(max_requests, max_tokens, max_tokens - decoding)
        requests = limits.max_requests(max_requests, view.num_running)
        if lending is not None and not lending.admits:
            requests = min(requests, view.num_running)
        tokens = limits.max_tokens(max_tokens, decoding)
        budget = tokens - decoding
        longest = limits.longest_chunk(view, budget)
        embeds = None if lending is None else min(limits.encoder_embeds, lending.left_for_step())
        if self.rounds is None:
            return StepPlan(requests, tokens, longest, embeds)
        rounds = self.rounds.begin(view, requests, budget, tokens, now)
        return StepPlan(requests, decoding + rounds.prompt_tokens, min(longest, rounds.longest), embeds, rounds.aside)

    def step_ended(
        self,
        view: EngineView,
        now: float,
        *,
        num_running: int,
        num_requests: int,
        prompt_tokens: int,
        rest_seconds: float = 0.0,
        encodes: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        """Learn from a step whose tokens are out.

        ``num_running``: requests that run now. ``num_requests``, ``prompt_tokens``: of the step. ``rest_seconds``: for
        which it was held back. ``encodes``: modality -> embeddings, and the seconds that they took, as far as known;
        None if it encoded nothing.
        """
        if encodes is not None and self.lending is not None:
            self.lending.step_out()
        if encodes:
            for modality, (embeds, seconds) in encodes.items():
                self.costs.encoded(modality, embeds, seconds)
        taken = self.steps.step(now, num_running, prompt_tokens, rest_seconds=rest_seconds, encoded=encodes is not None)
        if taken is not None:
            if prompt_tokens:
                self.costs.prefilled(prompt_tokens, self.steps.seconds_per_token * prompt_tokens)
            limits = self.limits
            if limits.batch is not None or limits.prefill is not None:
                limits.step_ended(now, taken, num_requests, prompt_tokens)
        if self.ahead is not None:
            self.ahead.step_ended(view, now)

    # -- for tests and debugging ---------------------------------------------

    def story(self, request_id: str) -> str:
        """Return what happened to a request, a line each; empty without a history."""
        return "" if self.history is None else self.history.story(request_id)

    def validate(self) -> None:
        """Check the conservation laws; for tests and debugging.

        Raises:
            AssertionError: names the law that is broken.
        """
        if self.ahead is not None:
            self.ahead.validate()
        if self.rounds is not None:
            self.rounds.validate(self.book)
