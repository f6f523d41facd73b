"""Scheduler half of encode-ahead: asks the core, and exchanges its actions for the workers' reports."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.encode_ahead import EncodeAhead
from vllm_omni_sched.core.engine.lane_ranks import AfterLoss, LaneRanks
from vllm_omni_sched.core.engine.lending import KvLending
from vllm_omni_sched.engine.ahead.host_planner import HostPlanner
from vllm_omni_sched.engine.ahead.messages import NO_LANE, AheadOrders, AheadReport, LaneFacts, LaneLoss, RankOrders
from vllm_omni_sched.engine.ahead.polling import rest_between_looks, sleep_beside
from vllm_omni_sched.engine.contents import Contents
from vllm_omni_sched.engine.lending.blocks import LentBlocks
from vllm_omni_sched.engine.scheduler_view import RequestPrompt, SchedulerView, prompt_tokens_of
from vllm_omni_sched.logs import logger_name
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.resource.engine.reuse import NotReused

logger = init_logger(logger_name(__name__))


class AheadPlanner:
    """Keeps the data of items that are to be encoded, and carries out what `EncodeAhead` decides.

    1. Before `bind` every request may run: vLLM makes the connector before our scheduler is complete.
    2. An encoding that workers hold in host memory counts as ready: it is restored, not encoded.
    3. An item whose room in the encoder cache was taken back in the same step is forgotten instead of loaded.
    4. With several workers, `LaneRanks` decides what their reports amount to.
    5. Nothing is sent to a lane that the workers have not reported: before their first report, and where they cannot
       have one, all items are left to the step.
    6. The lane and the core know an item by its identifier. If two with different data have one identifier, they know
       each further item of that identifier by the digest of its data as well. vLLM asks by identifier, right after it
       has asked whether the request may run: what is ready is what that request needs.
    7. After `forget`, all that requests wait for is encoded once more, and reports of the epoch before are ignored.

    Args:
        config: the options of the engine.
        contents: the digests of items.
        workers: number of workers that encode together.

    ``epoch``: how often what was encoded was given up. ``identifiers``: content -> identifier, of those of rule 6.
    """

    def __init__(self, config: OmniSchedConfig, contents: Contents, workers: int = 1) -> None:
        self._lane = NO_LANE
        self._ranks = LaneRanks(workers)
        self._generation = 0  # that workers were sent
        self._settled: list[str] = []  # contents that all of several workers have encoded since the last orders
        self._broken: list[str] = []  # contents that one of several workers could not encode
        self._contents = contents
        self._features: dict[str, Any] = {}  # items that requests wait for, with their data
        self._ambiguous: set[str] = set()  # identifiers of rule 6
        self.identifiers: dict[str, str] = {}
        self._asked: dict[str, str] = {}  # the same by identifier, for the request that was asked for last
        self.epoch = 0
        self._counts_news = compat.ec_connectors_have_stats()
        self._news: tuple[list[float], int] = ([], 0)
        self._known: list[int] = []  # tickets whose encodes have ended since the last orders
        self._rested = 0.0  # seconds for which the step was held back whose results have come last
        self.host = HostPlanner(config.encoder_cache_host_bytes, contents)
        self.encoded_in_step = 0
        self._decisions: EncodeAhead | None = None
        self._lent: LentBlocks | None = None
        self._lending: KvLending | None = None
        self._largest_told = config.encode_bytes_per_embed

    def bind(self, scheduler: Any, core: EngineCore, view: SchedulerView, lent: LentBlocks | None = None) -> None:
        """Give this planner access to the scheduler, to the core that decides for it, and to the lent KV blocks."""
        self._lent, self._lending = lent, core.lending
        self._scheduler, self._view = scheduler, view
        self._decisions, self._metrics = core.ahead, core.metrics
        self._lane_is(NO_LANE)  # until the workers report that they have one
        self.host.bind(scheduler.encoder_cache_manager, scheduler.vllm_config.model_config)
        if scheduler.vllm_config.device_config.device_type == "cpu":
            sleep_beside(self)
            rest_between_looks()

    @property
    def decisions(self) -> EncodeAhead:
        """Return the part of the core that decides; `bind` must have been called."""
        assert self._decisions is not None
        return self._decisions

    def hash_ahead(self, feature: Any) -> None:
        """Hash the data of an item, on whichever thread, if its encoding may go to host memory."""
        if self.host.tier.max_bytes:
            self._contents.of(feature)

    def may_run(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether the encodings of the request's next chunk, or of a piece worth a step, are available."""
        if self._decisions is None:
            return True
        self._asked.clear()
        prompt = RequestPrompt(request, self._content_of)
        chunk = self._decisions.next_chunk(prompt, num_computed_tokens, self._view, monotonic_seconds())
        for item in chunk.wanted:
            if item.content not in self._features:
                self._features[item.content] = request.mm_features.with_data(item.position)
        return chunk.may_run

    def _content_of(self, feature: Any, num_embeds: int) -> str:
        """Return what the core knows an item by that vLLM may ask for next, by rule 6."""
        mm_hash: str = feature.identifier
        self.host.look(feature, num_embeds)
        first = self._features.get(mm_hash)
        if mm_hash not in self._ambiguous:
            if first is None or feature.data is None or self._contents.same(first, feature):
                return mm_hash
            self._ambiguous.add(mm_hash)
            self.host.not_reused[NotReused.OTHER_CONTENT] += 1
        content = f"{mm_hash} with {self._contents.of(feature)}"
        self.identifiers[content] = mm_hash
        self._asked.setdefault(mm_hash, content)
        return content

    def is_ready(self, mm_hash: str) -> bool:
        """Return whether the lane or host memory holds this encoding."""
        content = self._asked.get(mm_hash, mm_hash)
        return (self._decisions is not None and self._decisions.is_ready(content)) or self.host.has(mm_hash)

    def allocated(self, request: Request, item: int) -> None:
        """Record that the encoder cache has made room for an item, and order its encoding from lane or host memory."""
        feature = request.mm_features[item]
        mm_hash: str = feature.identifier
        content = self._asked.get(mm_hash, mm_hash)
        if not self.decisions.load(content, monotonic_seconds()) and not self.host.restore(mm_hash):
            self.encoded_in_step += 1
        self.host.allocated(feature, request.get_num_encoder_embeds(item))

    @property
    def has_orders(self) -> bool:
        """Return whether workers must still be sent orders, even when no request is left."""
        return self._decisions is not None and self._decisions.ledger.has_orders

    def take_orders(self, output: SchedulerOutput) -> AheadOrders:
        """Return the orders that go to the workers with this step."""
        decisions, ledger = self.decisions, self.decisions.ledger
        ranks = self._rank_orders()
        actions = decisions.take_actions()
        submit = []
        for mm_hash, ticket, modality, embeds in actions.submit:
            submit.append((mm_hash, ticket, modality, self._features[mm_hash].data, embeds))
        if len(self._features) > len(ledger):
            self._features = {h: f for h, f in self._features.items() if ledger.state(h) is not None}
        host = self.host.take_orders(output.free_encoder_mm_hashes)
        # The request may have been preempted and the item evicted later in this step: no worker would ever free it.
        cached = self._scheduler.encoder_cache_manager.cached
        named = [(content, self.identifiers.get(content, content)) for content in actions.load]
        load = {content: mm_hash for content, mm_hash in named if mm_hash in cached}
        forget = (*actions.forget, *self._broken, *(content for content, mm_hash in named if mm_hash not in cached))
        self._broken = []
        if self._ambiguous and not len(ledger):
            self._ambiguous.clear()
            self.identifiers.clear()
        pending, idle, rest = ledger.num_pending > 0, not output.total_num_scheduled_tokens, 0.0
        if pending and not idle:
            rest = decisions.rest_seconds(self._view, prompt_tokens_of(output))
        known, self._known = tuple(self._known), []
        lent = () if self._lent is None else self._lent.take_new()
        return AheadOrders(
            forget, load, submit, decisions.share, pending, rest, host, ranks, idle, known, lent, self.epoch
        )

    def forget(self) -> None:
        """Use nothing that was encoded so far: the weights may have changed (rule 7)."""
        self.epoch += 1
        self.host.forget()
        self._known, self._settled, self._broken = [], [], []
        self._ranks.renew()
        if self._decisions is not None:
            self._decisions.ledger.drop_attempts()

    def _rank_orders(self) -> RankOrders | None:
        """Return the orders that only several workers get; None without news for them."""
        generation, settled = self._ranks.generation, tuple(self._settled)
        if generation == self._generation and not settled:
            return None
        again: tuple[tuple[str, int], ...] = ()
        if generation != self._generation:
            again = self.decisions.attempt_again()
            self._ranks.encode_in_step(ticket for _, ticket in again)
        self._generation, self._settled = generation, []
        return RankOrders(generation, self._ranks.stopped, again, settled)

    def take_report(self, report: AheadReport) -> None:
        """Take over a worker's report: encodes that ended, their times, and the state of host memory."""
        if report.epoch != self.epoch:
            return
        decisions, now = self.decisions, monotonic_seconds()
        ends = self._ranks.stopped or (report.loss is not None and report.loss.final)
        if report.lane != self._lane and not ends:
            self._lane_is(report.lane)
        took = []
        for ticket, (mm_hash, seconds, workers) in report.ready.items():
            slowest = self._ranks.encoded(ticket, workers, seconds)
            if slowest is None:
                continue
            took.append(slowest)
            decisions.encoded(mm_hash, ticket, slowest, now)
            if self._ranks.workers > 1:
                self._settled.append(mm_hash)
        broken = [(mm_hash, ticket) for ticket, (mm_hash, _) in report.failed.items() if self._ranks.failed(ticket)]
        for mm_hash, ticket in broken:
            decisions.failed(mm_hash, ticket, now)
            if self._ranks.workers > 1:
                self._broken.append(mm_hash)
        self._known += (ticket for ticket in (*report.ready, *report.failed) if not self._ranks.awaits(ticket))
        if self._counts_news:
            before, failed = self._news
            self._news = [*before, *took], failed + len(broken)
        if report.loss is not None:
            self._lane_lost(report.loss)
        self._rested = report.rested
        if self._lent is not None:
            self._lent_memory(report)
        self._metrics.lane_restarts = max(self._metrics.lane_restarts, report.restarts)
        self.host.take_encode_times(report.times)
        self.host.take_report(report.host)

    def _lane_is(self, lane: LaneFacts) -> None:
        self._lane = lane
        self.decisions.lane_is(lane.items, own_processors=lane.own_processors)

    def _lent_memory(self, report: AheadReport) -> None:
        """Count the memory that was given back, and compare what encodes take with what the operator has set."""
        self._metrics.kv_given_back_bytes += report.given_back_bytes
        measured = report.bytes_per_embed
        self._metrics.bytes_per_embed = max(self._metrics.bytes_per_embed, measured)
        if measured > self._largest_told:
            logger.warning(
                "An encode took %.0f bytes for each of its embeddings, and KV blocks are lent for %.0f: raise "
                "'expert.encode_bytes_per_embed', or encodes may take more memory than was lent to them.",
                measured,
                self._largest_told,
            )
            self._largest_told = measured

    def take_rested(self) -> float:
        """Return, once, for how many seconds the step was held back whose results have come last."""
        rested, self._rested = self._rested, 0.0
        return rested

    @property
    def encoding(self) -> bool:
        """Return whether an item is being encoded, or is about to be."""
        return self._decisions is not None and self._decisions.ledger.num_pending > 0

    def _lane_lost(self, loss: LaneLoss) -> None:
        after = self._ranks.lost(loss.generation, final=loss.final)
        pending = self.decisions.ledger.num_pending
        if after is AfterLoss.RENEW:
            logger.warning(
                "Encode-ahead: the encoder process of a worker has ended, and those of the other workers cannot encode "
                "without it. The items at work, of %d pending, are encoded in the step; new processes are started: %s",
                pending,
                loss.reason,
            )
        elif after is AfterLoss.STOP:
            had_lanes = self._lane != NO_LANE
            self._lane_is(NO_LANE)
            if not had_lanes:
                return  # the workers have logged why they have none
            logger.error(
                "Encode-ahead stops: the encoder processes of the workers cannot go on, so all further items are "
                "encoded in the step. Restart the engine to encode ahead again: %s",
                loss.reason,
            )

    @property
    def has_news(self) -> bool:
        """Return whether encodes have ended since the last `take_news`."""
        return bool(self._news[0] or self._news[1])

    def take_news(self) -> tuple[list[float], int]:
        """Return the seconds of each encode that ended since the last call, and the number of failed ones."""
        news, self._news = self._news, ([], 0)
        return news

    def take_failed(self) -> set[str]:
        """Return, once, the ids of requests that wait for an item that cannot be encoded."""
        return self.decisions.take_failed()

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Copy this planner's counts into ``metrics``."""
        decisions = self.decisions
        metrics.ahead_pending = decisions.ledger.num_pending
        metrics.lane_share = decisions.share
        metrics.encoder_tier_lane = decisions.taken_from_lane
        metrics.encoder_tier_miss = self.encoded_in_step
        if self._lent is not None and self._lending is not None:
            metrics.kv_lent_blocks = len(self._lent)
            for reason, number in self._lending.reasons.items():
                metrics.kv_loans[reason.value] = number
        self.host.count_into(metrics)
