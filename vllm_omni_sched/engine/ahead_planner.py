"""Scheduler half of encode-ahead: decides which requests wait for an encoding, and what the lane encodes."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.core.engine.ledger import LEAST_PIECE, AheadLedger, EncodeState
from vllm_omni_sched.engine.ahead_messages import AheadOrders, AheadReport, LaneFacts
from vllm_omni_sched.engine.host_planner import HostPlanner
from vllm_omni_sched.engine.prompt_tokens import prompt_tokens_of
from vllm_omni_sched.engine.sla import SlaBook
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.step_times import StepMeter
from vllm_omni_sched.resource.lane_share import DecodeLoad, LaneShare
from vllm_omni_sched.resource.pace import PACE, PACE_BESIDE, DecodePace
from vllm_omni_sched.resource.share import EncodeShare, Where


class AheadPlanner:
    """Shows the scheduler's state to the encode-ahead policies and applies their decisions.

    1. `EncodeShare` says whether the items of a request's next chunk are encoded in the step or in the lane.
    2. While they are in the lane, the request waits for them; a piece of its prompt in front of the first
       missing item may run.
    3. An item that went to the lane for a request is never encoded in a step for that request: the
       workers are not sent its data a second time.
    4. Streaming sessions, and items whose data the scheduler does not hold, are left to vLLM.
    5. Only the items of the next chunk are looked at, however many items the request has.
    6. `LaneShare` follows the inter-token latency; `DecodePace` leaves the lane that share when both use the
       same processors.
    7. An encoding that workers hold in host memory counts as ready: it is restored, not encoded.
    """

    def __init__(self, vllm_config: Any, config: OmniSchedConfig) -> None:
        self._chunk = vllm_config.scheduler_config.max_num_batched_tokens
        self._target, self._share_target = config.itl_target_ms / 1000, config.share_target_seconds
        self._policy = EncodeShare(max_alone_seconds=2 * self._target)
        self._lane_share = LaneShare(config.encode_lane_min_share)
        on_cpu = getattr(vllm_config.device_config, "device_type", "") == "cpu"
        self._paces = {
            own: DecodePace(pace if config.decode_pace is None else config.decode_pace) if on_cpu else DecodePace(0.0)
            for own, pace in ((False, PACE), (True, PACE_BESIDE))
        }
        self._lane = LaneFacts()
        self.rest_seconds = 0.0  # of the last step
        self._in_step_seconds = 0.0  # of the encodes in the step that is being planned
        self.share = 1.0
        self.ledger = AheadLedger(0)
        self._features: dict[str, Any] = {}  # items that requests wait for and no worker was sent yet
        self._wanted: dict[str, tuple[str, int, float]] = {}  # mm_hash -> modality, embeddings, since when
        self._limits: dict[str, int] = {}  # request id -> position of its first missing item
        self._ahead: set[str] = set()  # requests with items in the lane (rule 3)
        self._failed: set[str] = set()
        self._scheduler: Any = None
        self.items_visited = 0
        self._counts_news = compat.ec_connectors_have_stats()
        self._news: tuple[list[float], int] = ([], 0)
        self.host = HostPlanner(config.encoder_cache_host_bytes)
        self.taken_from_lane = 0
        self.encoded_in_step = 0

    def bind(self, scheduler: Any, book: SlaBook, steps: StepMeter, metrics: SchedulerMetrics) -> None:
        """Give this planner access to the scheduler's requests and encoder cache, and to the shared meters."""
        self._scheduler = scheduler
        self._steps = steps
        self._anybody = DecodeLoad(self._target)
        self._book = book
        self._metrics = metrics
        self.ledger.max_embeds = scheduler.encoder_cache_manager.cache_size
        self.host.bind(scheduler.encoder_cache_manager)

    def stepped(self, now: float) -> None:
        """Adapt the lane's share to the inter-token latency, now that a step's tokens are out."""
        if self.ledger.num_pending:
            self.share, reason = self._lane_share.update(self._running(self._share_target), now)
            self._metrics.share_updates[reason.value] += 1

    def _running(self, target: float | None = None) -> DecodeLoad | None:
        """Those who run, as one class under the tightest of their targets: they all wait for the same steps."""
        running = self._scheduler.running
        if not running:
            return None
        target = min(target or self._target, *(self._book.of(r.request_id).itl_seconds for r in running))
        itl = self._steps.itl.seconds
        return DecodeLoad(target, None if itl is None else itl + self._in_step_seconds)

    def _rest_before(self, output: SchedulerOutput) -> float:
        """Return the seconds for which this step is held back in favour of the lane."""
        encoding = self.ledger.num_pending > 0 and output.total_num_scheduled_tokens > 0
        load = self._running() if encoding else None
        seconds, _ = self._paces[self._lane.own_processors].rest(
            self.share,
            self._steps.predict(prompt_tokens_of(output)),
            self._steps.itl.seconds,
            self._target if load is None else load.itl_target_seconds,
            encoding=encoding,
            decoding=load is not None,
        )
        self._metrics.decode_rest_seconds += seconds
        return seconds

    def goes_ahead(self, request_id: str) -> bool:
        """Return whether items of this request went to the lane."""
        return request_id in self._ahead

    def may_run(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether the encodings of the request's next chunk, or of a piece worth a step, are available."""
        features = request.mm_features
        self._limits.pop(request.request_id, None)
        if request.request_id in self._failed:
            return False  # the request is about to be finished with an error
        if self._scheduler is None or request.resumable or not isinstance(features, FeatureList):
            return True
        window = features.spans.overlapping(num_computed_tokens, num_computed_tokens + self._chunk)
        if not window:
            return True
        missing = self._missing(features, window)
        if not missing or (request.request_id not in self._ahead and self._in_step(request, features, missing)):
            return True
        self._ahead.add(request.request_id)
        for i in missing:
            feature, num_embeds = features[i], self._num_embeds(request, i)
            if self.ledger.want(request.request_id, feature.identifier, num_embeds) is EncodeState.QUEUED:
                self._features[feature.identifier] = features.with_data(i)
                self._wanted.setdefault(feature.identifier, (feature.modality, num_embeds, monotonic_seconds()))
        limit = min(features.spans.starts[i] for i in missing)
        self._limits[request.request_id] = limit
        return limit - num_computed_tokens >= LEAST_PIECE

    def _missing(self, features: FeatureList, window: Sequence[int]) -> list[int]:
        """Return the items of the window that are neither cached nor ready, and that a lane can encode."""
        self.items_visited += len(window)
        cached = self._scheduler.encoder_cache_manager.cached
        return [
            i
            for i in window
            if features[i].identifier not in cached
            and not self.is_ready(features[i].identifier)
            and features[i].data is not None
            and "address" not in features[i].data
            and features[i].modality != "prompt_embeds"
        ]

    def _in_step(self, request: Request, features: FeatureList, missing: list[int]) -> bool:
        """Return whether the missing items are encoded in the step; False if the lane has any of them already."""
        if any(self.ledger.state(features[i].identifier) is not None for i in missing):
            return False
        costs = self._book.costs
        seconds = sum(costs.encode_seconds(features[i].modality, self._num_embeds(request, i)) for i in missing)
        seconds = seconds or len(missing) * self._target  # nothing was measured: nothing is said to go unnoticed
        # Whoever waits is held up too; so is a session that is between two inputs.
        others = self._running() or self._anybody if len(self._scheduler.requests) > 1 else None
        placed = self._policy.place(others, seconds)
        self._metrics.placements[placed.reason.value] += 1
        in_step = placed.where is Where.IN_STEP
        self._in_step_seconds += seconds if in_step else 0.0
        return in_step

    @staticmethod
    def _num_embeds(request: Request, item: int) -> int:
        num_embeds: int = request.get_num_encoder_embeds(item)
        return num_embeds

    def cut(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens of this chunk lie before the first missing item."""
        limit = self._limits.get(request.request_id)
        return num_new_tokens if limit is None else max(0, min(num_new_tokens, limit - num_computed_tokens))

    def is_ready(self, mm_hash: str) -> bool:
        return self.ledger.state(mm_hash) is EncodeState.READY or self.host.has(mm_hash)

    def allocated(self, request: Request, item: int) -> None:
        """Note that the encoder cache has made room for an item, and order its encoding from lane or host memory."""
        mm_hash = request.mm_features[item].identifier
        if self.ledger.load(mm_hash):
            self.taken_from_lane += 1
        elif not self.host.restore(mm_hash):
            self.encoded_in_step += 1

    def release(self, request_id: str) -> None:
        """Drop all state of a request that has finished."""
        self.ledger.release(request_id)
        self._ahead.discard(request_id)
        self._limits.pop(request_id, None)
        self._failed.discard(request_id)

    @property
    def has_orders(self) -> bool:
        """Return whether workers must still be sent orders, even when no request is left."""
        return self.ledger.has_orders or self.host.has_orders

    def take_orders(self, output: SchedulerOutput) -> AheadOrders:
        """Return the orders that go to the workers with this step."""
        orders = self.ledger.take_orders()
        self._in_step_seconds = 0.0
        submit = []
        for mm_hash, ticket in orders.submit:
            feature = self._features.pop(mm_hash)
            submit.append((mm_hash, ticket, feature.modality, feature.data))
        if len(self._features) > len(self.ledger):
            self._features = {h: f for h, f in self._features.items() if self.ledger.state(h) is EncodeState.QUEUED}
        host = self.host.take_orders(output.free_encoder_mm_hashes)
        # The request may have been preempted and the item evicted later in this step: no worker would ever free it.
        cached = self._scheduler.encoder_cache_manager.cached
        load = tuple(mm_hash for mm_hash in orders.load if mm_hash in cached)
        forget = orders.forget + tuple(mm_hash for mm_hash in orders.load if mm_hash not in cached)
        if len(self._wanted) > 2 * len(self.ledger) + 64:
            self._wanted = {h: w for h, w in self._wanted.items() if self.ledger.state(h) is not None}
        self.rest_seconds = self._rest_before(output)
        return AheadOrders(forget, load, submit, self.share, self.ledger.num_pending > 0, self.rest_seconds, host)

    def take_report(self, report: AheadReport) -> None:
        """Take over a worker's report: encodes that ended, their times, and the state of host memory."""
        metrics = self._metrics
        if report.lane != self._lane:
            self._lane = report.lane
            self.ledger.max_encoding = (
                report.lane.items + 1
            )  # one item more, so that the next one is there when an encode ends
        for ticket, (mm_hash, seconds) in report.ready.items():
            self.ledger.ready(mm_hash, ticket)
            metrics.ahead_encoded += 1
            metrics.ahead_seconds += seconds
            if mm_hash in self._wanted:
                modality, num_embeds, since = self._wanted.pop(mm_hash)
                self._book.costs.encoded(modality, num_embeds, seconds)
                metrics.ahead_wait_seconds.observe(monotonic_seconds() - since)
        metrics.ahead_failed += len(report.failed)
        if self._counts_news:
            took, failed = self._news
            self._news = [*took, *(s for _, s in report.ready.values())], failed + len(report.failed)
        for ticket, (mm_hash, _) in report.failed.items():
            self._failed.update(self.ledger.failed(mm_hash, ticket))
            self._wanted.pop(mm_hash, None)
        metrics.lane_restarts = max(metrics.lane_restarts, report.restarts)
        self.host.take_encode_times(report.times)
        self.host.take_report(report.host)

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
        failed, self._failed = self._failed, set()
        return failed

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Copy this planner's counts into ``metrics``."""
        metrics.ahead_pending = self.ledger.num_pending
        metrics.lane_share = self.share
        metrics.encoder_tier_lane = self.taken_from_lane
        metrics.encoder_tier_miss = self.encoded_in_step
        self.host.count_into(metrics)
