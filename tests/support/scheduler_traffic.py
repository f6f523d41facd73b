"""Synthetic traffic of an engine and of the API process before it, counted in the objects that they count with."""

import math
import random

from prometheus_client import CollectorRegistry, generate_latest

from vllm_omni_sched.config.errors import VideoDeadlineError, VideoInputError
from vllm_omni_sched.engine.preprocess.metrics import Fallback, PreprocessMetrics
from vllm_omni_sched.engine.video.metrics import VideoMetrics
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.device_metrics import DeviceCollector, DeviceReading
from vllm_omni_sched.monitor.exposition import merge, render
from vllm_omni_sched.preprocess.order import Outcome
from vllm_omni_sched.resource.engine.lending import EncodeDemand, LendingReason, LendingSnapshot, MemoryLending
from vllm_omni_sched.video.results import STAGES, Report

SEASON = 30.0
TICK = 0.05
LABELS = {"engine": "0", "model_name": "synthetic"}
ITEMS = {"lane": 5, "device": 3, "miss": 1, "host": 1}
BLOCKS, BLOCK_BYTES = 1000, 1 << 20  # of the KV cache


class Families:
    """A collector of given families."""

    def __init__(self, families):
        self._families = families

    def collect(self):
        return self._families


class _Loans:
    """Large encodes, one at a time, that borrow KV blocks as the policy decides."""

    def __init__(self, rng: random.Random) -> None:
        self._policy, self._rng = MemoryLending(0.25), rng
        self._demand = self._used = 0
        self._ends = 0.0

    def advance(self, metrics: SchedulerMetrics, now: float, load: float) -> None:
        """Let an encode begin or end, and count the plan of a step."""
        rng = self._rng
        if now >= self._ends:
            self._used = 0
        if not self._demand and rng.random() < 0.02 * load:
            self._demand = rng.randint(60, 240)
        lent = metrics.kv_lent_blocks
        free = max(0, round(BLOCKS * (1.1 - 0.6 * load)) - lent)
        demands = (EncodeDemand(self._demand),) if self._demand and not self._used else ()
        blocked = load > 1.55
        plan = self._policy.plan(LendingSnapshot(BLOCKS, free, lent, self._used, 60, demands, blocked), now)
        if plan.reason is not LendingReason.NOT_NEEDED:
            metrics.kv_loans[plan.reason.value] += 1
        metrics.kv_given_back_bytes += max(0, plan.blocks - lent) * BLOCK_BYTES
        metrics.kv_lent_blocks = plan.blocks
        if demands and plan.blocks >= self._demand:
            metrics.bytes_per_embed = max(metrics.bytes_per_embed, 9e4 * rng.lognormvariate(0, 0.1))
            self._used, self._demand, self._ends = self._demand, 0, now + self._demand * 0.01


class SchedulerTraffic:
    """Chat with pictures, sessions and videos whose load has a season; now and then a process dies."""

    def __init__(self, seed: int = 0) -> None:
        self.metrics = SchedulerMetrics()
        self.video, self.preprocess = VideoMetrics(), PreprocessMetrics()
        self.devices: list[DeviceReading] = []
        self._rng = random.Random(seed)
        self._loans = _Loans(random.Random(seed))
        self._ticks = 0

    def advance(self, now: float) -> None:
        """Let happen what is due."""
        while self._ticks * TICK <= now:
            self._tick(1 + 0.6 * math.sin(2 * math.pi * self._ticks * TICK / SEASON))
            self._ticks += 1
            if self._ticks % round(SEASON / TICK) == 0:
                self._die()

    def page(self) -> bytes:
        """Return the metrics as they are now."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Families(merge([(LABELS, render(self.metrics).decode())])))
        for collector in (self.video, self.preprocess, DeviceCollector(lambda: self.devices)):
            registry.register(collector)
        return generate_latest(registry)

    def _tick(self, load: float) -> None:
        self._steps(load)
        self._requests(load)
        for _ in range(self._draw(1.5 * load)):
            self._item(load)
        self._loans.advance(self.metrics, self._ticks * TICK, load)
        self._sessions(load)
        self._devices(load)
        if self._rng.random() < 0.05 * load:
            self._video()
        if self._rng.random() < 0.4 * load:
            self._preprocess(load)

    def _draw(self, mean: float) -> int:
        """Return a whole number with that mean."""
        return math.floor(mean) + (self._rng.random() < mean % 1)

    def _steps(self, load: float) -> None:
        metrics, rng = self.metrics, self._rng
        metrics.steps += 2
        metrics.windows_narrowed += self._draw(4 * load)
        metrics.windows_native += self._draw(load)
        metrics.items_visited += self._draw(6 * load)
        metrics.schedule_seconds.observe(4e-4 * load * rng.lognormvariate(0, 0.4))
        metrics.step_requests.observe(max(1, round(20 * load * rng.lognormvariate(0, 0.3))))
        metrics.batch_limit = round(32 - 8 * load)
        metrics.batch_updates["over_target" if load > 1.4 else "on_target" if load > 0.8 else "under_target"] += 2
        metrics.prefill_limit = round(1024 / load)
        metrics.prefill_updates["over_target" if load > 1.3 else "under_target"] += 2

    def _requests(self, load: float) -> None:
        metrics, rng = self.metrics, self._rng
        for named, mean in (("realtime", 0.2), ("interactive", 2.0), ("batch", 6.0)):
            metrics.waiting_requests[named] = self._draw(mean * max(0.0, load - 0.7))
        for _ in range(self._draw(0.5 * load)):
            named = rng.choices(("realtime", "interactive", "batch"), (2, 5, 1))[0]
            reason = {"realtime": "realtime", "interactive": "deadline", "batch": "arrival"}[named]
            metrics.admitted[rng.choices((reason, "aged", "affinity"), (8, 1, 1))[0]] += 1
            first = {"realtime": 0.12, "interactive": 0.6, "batch": 3.0}[named] * load * rng.lognormvariate(0, 0.5)
            metrics.ttft_seconds[named].observe(first)
            for _ in range(20):
                metrics.itl_seconds[named].observe(0.03 * load * rng.lognormvariate(0, 0.3))
            kept = first < {"realtime": 0.3, "interactive": 2.0, "batch": math.inf}[named]
            (metrics.slo_met if kept else metrics.slo_missed)[named] += 1

    def _item(self, load: float) -> None:
        metrics, rng = self.metrics, self._rng
        where = rng.choices([*ITEMS], [*ITEMS.values()])[0]
        found = where in ("device", "host")
        setattr(metrics, f"encoder_tier_{where}", getattr(metrics, f"encoder_tier_{where}") + 1)
        metrics.encoder_cache_hits += found
        metrics.encoder_cache_misses += not found
        metrics.encode_rounds[rng.choice(("fits", "nobody_decodes", "held", "goodput"))] += 1
        metrics.ahead_pending = self._draw(2 * load)
        if where == "lane":
            seconds = 0.02 * rng.lognormvariate(0, 0.4)
            metrics.ahead_encoded += 1
            metrics.ahead_seconds += seconds
            metrics.ahead_wait_seconds.observe(seconds * (1 + 2 * load))
            metrics.decode_rest_seconds += seconds / 8
            metrics.placements["would_stall_decode"] += 1
            metrics.lane_share = min(1.0, max(0.1, metrics.lane_share * (0.95 if load > 1 else 1.05)))
            metrics.share_updates["over_target" if load > 1 else "under_target"] += 1
        elif where == "miss":
            metrics.placements[rng.choice(("no_decode", "would_not_be_noticed"))] += 1
        if not found and rng.random() < 0.5:
            kept = rng.random() < 0.7
            metrics.encoder_evictions += 1
            metrics.host_offers["restore_is_quicker" if kept else "encode_is_quicker"] += 1
            metrics.host_tier_bytes = min(2 << 30, metrics.host_tier_bytes + (kept << 22))
        self._shared_item(found)

    def _shared_item(self, found: bool) -> None:
        metrics, rng = self.metrics, self._rng
        metrics.shared_made += not found
        metrics.shared_host += found and rng.random() < 0.3
        if rng.random() < 0.1:
            metrics.shared_awaited += 1
            metrics.shared_gave_up += rng.random() < 0.05

    def _devices(self, load: float) -> None:
        self.devices = [
            DeviceReading(
                index,
                f"GPU-{index}",
                "synthetic",
                min(1.0, 0.5 * load + 0.1 * index),
                0.2 * load,
                0.0,
                round((40 + 8 * load) * (1 << 30)),
                80 << 30,
            )
            for index in range(2)
        ]

    def _sessions(self, load: float) -> None:
        metrics, rng = self.metrics, self._rng
        metrics.sessions = round(40 * load)
        metrics.session_updates_delta += self._draw(8 * load)
        metrics.session_updates_full += rng.random() < 0.2
        moved = self._draw(3 * load)
        metrics.spilled_items += moved
        metrics.spilled_bytes = round(metrics.sessions * (64 << 20) * (1 + 0.02 * rng.random()))
        metrics.restored_items += rng.random() < 0.05 * load

    def _video(self) -> None:
        rng = self._rng
        self.video.busy(rng.randint(0, 8), 8)
        seconds = {stage: rng.lognormvariate(-3, 0.5) for stage in STAGES}
        reasons = ("disorder",) if rng.random() < 0.1 else ()
        self.video.loaded(Report(seconds, 4, rng.randint(32, 64), 32, rng.randint(0, 1 << 20), reasons))
        if rng.random() < 0.05:
            self.video.missed(1)
            self.video.failed(rng.choice((VideoInputError("damaged"), VideoDeadlineError("too late"))))

    def _preprocess(self, load: float) -> None:
        rng = self._rng
        self.preprocess.started(0.01 * load * rng.lognormvariate(0, 0.5))
        self.preprocess.ended(rng.choices((Outcome.DONE, Outcome.BAD_INPUT), (50, 1))[0], rng.lognormvariate(-3, 0.4))
        self.preprocess.state(rng.randint(0, 2), self._draw(load), self._draw(4 * load) << 20)
        if rng.random() < 0.05:
            self.preprocess.fell_back(rng.choice([*Fallback]))

    def _die(self) -> None:
        self.metrics.lane_restarts += 1
        self.metrics.ahead_failed += 1
        self.video.restarted("decoder")
        self.preprocess.restarted()
