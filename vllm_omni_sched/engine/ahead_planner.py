"""Scheduler half of encode-ahead: who waits for which encoding, and what the lane is given."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.engine.ahead_messages import AheadOrders, AheadReport
from vllm_omni_sched.engine.host_planner import HostPlanner
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.items.ahead import AheadLedger, EncodeState
from vllm_omni_sched.monitor.itl import ItlMeter
from vllm_omni_sched.monitor.metrics import SchedulerMetrics
from vllm_omni_sched.resource.lane_share import DecodeLoad, LaneShare

_LEAST_PIECE = 64  # tokens; a shorter piece of prompt in front of a missing item is not worth a step


class AheadPlanner:
    """Decides, request by request, what is encoded ahead.

    1. While nothing else runs, items are encoded in the step, at full width: nobody notices.
    2. Else the items of the next chunk go to the lane, and the request waits for them; a
       piece of its prompt in front of the first missing item may run.
    3. What has once gone to the lane for a request is never encoded in a step for it: its
       workers are not sent the data a second time.
    4. Streaming sessions, and items whose data is not here, are vLLM's as before.
    5. Only the items of the next chunk are looked at, however long the list.
    6. What workers hold in host memory is ready: it is restored, not encoded.
    """

    def __init__(self, vllm_config: Any, config: OmniSchedConfig) -> None:
        self._chunk = vllm_config.scheduler_config.max_num_batched_tokens
        self._target = config.itl_target_ms / 1000
        self._lane_share = LaneShare(config.encode_lane_min_share)
        self._itl = ItlMeter()
        self.share = 1.0
        self.ledger = AheadLedger(0)
        self._scheduler: Any = None
        self._features: dict[str, Any] = {}  # wanted, and not with a worker yet
        self._limits: dict[str, int] = {}  # request id -> position of its first missing item
        self._ahead: set[str] = set()  # requests of rule 3
        self._failed: set[str] = set()
        self.items_visited = 0
        self.encoded = 0
        self.failed = 0
        self.encode_seconds = 0.0
        self.lane_restarts = 0
        self.host = HostPlanner(config.encoder_cache_host_bytes)
        self.taken_from_lane = 0
        self.encoded_in_step = 0

    def bind(self, scheduler: Any) -> None:
        """Let this planner see what runs, and what is in the encoder cache."""
        self._scheduler = scheduler
        self.ledger.max_embeds = scheduler.encoder_cache_manager.cache_size
        self.host.bind(scheduler.encoder_cache_manager)

    def stepped(self, now: float) -> None:
        """A step's tokens are out: the lane's share follows how long they took."""
        num_decoding = len(self._scheduler.running)
        self._itl.step(now, num_decoding)
        if self.ledger.num_pending:
            decoding = DecodeLoad("all", num_decoding, self._target, self._itl.seconds)
            self.share, _ = self._lane_share.update((decoding,), now)

    def goes_ahead(self, request_id: str) -> bool:
        """Whether items of this request went to the lane."""
        return request_id in self._ahead

    def may_run(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the next chunk of ``request`` has what it needs, or a piece of it that is worth a step."""
        features = request.mm_features
        self._limits.pop(request.request_id, None)
        if self._scheduler is None or request.resumable or not isinstance(features, FeatureList):
            return True
        window = features.spans.overlapping(num_computed_tokens, num_computed_tokens + self._chunk)
        if not window:
            return True
        missing = self._missing(features, window)
        if not missing or (request.request_id not in self._ahead and self._is_alone(request, features, missing)):
            return True
        self._ahead.add(request.request_id)
        for i in missing:
            feature = features[i]
            if self.ledger.want(request.request_id, feature.identifier, self._num_embeds(request, i)) is (
                EncodeState.QUEUED
            ):
                self._features[feature.identifier] = features.with_data(i)
        limit = min(features.spans.starts[i] for i in missing)
        self._limits[request.request_id] = limit
        return limit - num_computed_tokens >= _LEAST_PIECE

    def _missing(self, features: FeatureList, window: Sequence[int]) -> list[int]:
        """Items of the window that are neither in the encoder cache nor ready, and can be encoded in a lane."""
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

    def _is_alone(self, request: Request, features: FeatureList, missing: list[int]) -> bool:
        """Nobody would notice an encode in the step, and none of these is in the lane already."""
        others = len(self._scheduler.running) - (request.status is RequestStatus.RUNNING)
        return not others and all(self.ledger.state(features[i].identifier) is None for i in missing)

    @staticmethod
    def _num_embeds(request: Request, item: int) -> int:
        num_embeds: int = request.get_num_encoder_embeds(item)
        return num_embeds

    def cut(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Tokens of this chunk that lie before the first item that is missing."""
        limit = self._limits.get(request.request_id)
        return num_new_tokens if limit is None else max(0, min(num_new_tokens, limit - num_computed_tokens))

    def is_ready(self, mm_hash: str) -> bool:
        return self.ledger.state(mm_hash) is EncodeState.READY or self.host.has(mm_hash)

    def allocated(self, request: Request, item: int) -> None:
        """The encoder cache has made room for this item."""
        mm_hash = request.mm_features[item].identifier
        if self.ledger.load(mm_hash):
            self.taken_from_lane += 1
        elif not self.host.restore(mm_hash):
            self.encoded_in_step += 1

    def release(self, request_id: str) -> None:
        """The request is over."""
        self.ledger.release(request_id)
        self._ahead.discard(request_id)
        self._limits.pop(request_id, None)
        self._failed.discard(request_id)

    @property
    def has_orders(self) -> bool:
        """Workers are still to be told something, though no request may be left."""
        return self.ledger.has_orders or self.host.has_orders

    def take_orders(self, freed: Sequence[str] = ()) -> AheadOrders:
        """For the workers, with this step, which frees these encodings (mm_hash)."""
        orders = self.ledger.take_orders()
        submit = []
        for mm_hash, ticket in orders.submit:
            feature = self._features.pop(mm_hash)
            submit.append((mm_hash, ticket, feature.modality, feature.data))
        if len(self._features) > len(self.ledger):
            self._features = {h: f for h, f in self._features.items() if self.ledger.state(h) is EncodeState.QUEUED}
        host = self.host.take_orders(freed)
        return AheadOrders(orders.forget, orders.load, submit, self.share, self.ledger.num_pending > 0, host)

    def take_report(self, report: AheadReport) -> None:
        """What a worker has done."""
        for ticket, (mm_hash, seconds) in report.ready.items():
            self.ledger.ready(mm_hash, ticket)
            self.encoded += 1
            self.encode_seconds += seconds
        self.failed += len(report.failed)
        for ticket, (mm_hash, _) in report.failed.items():
            self._failed.update(self.ledger.failed(mm_hash, ticket))
        self.lane_restarts = max(self.lane_restarts, report.restarts)
        self.host.take_encode_times(report.times)
        self.host.take_report(report.host)

    def take_failed(self) -> set[str]:
        """Requests that wait for something that cannot be encoded."""
        failed, self._failed = self._failed, set()
        return failed

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Hand over what was counted here."""
        metrics.ahead_encoded = self.encoded
        metrics.ahead_failed = self.failed
        metrics.ahead_pending = self.ledger.num_pending
        metrics.ahead_seconds = self.encode_seconds
        metrics.lane_restarts = self.lane_restarts
        metrics.lane_share = self.share
        metrics.encoder_tier_lane = self.taken_from_lane
        metrics.encoder_tier_miss = self.encoded_in_step
        self.host.count_into(metrics)
