"""A simulated engine with costs that one can add up by hand."""

from collections.abc import Iterable
from typing import Any

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.work import Job, Request


class PlainCosts:
    """Costs of which a step takes ``base``, and a constant more for each thing in it."""

    source = Source(SourceKind.ASSUMED, "round numbers")
    kv_tokens = 10**9

    def __init__(
        self,
        base: float = 0.0,
        decode: float = 0.0,
        prefill: float = 0.0,
        embed: float = 0.0,
        front: float = 0.0,
        answer: float = 0.0,
        left: float = 1.0,
    ) -> None:
        self.base, self.decode, self.prefill, self.embed = base, decode, prefill, embed
        self.front, self.answer_seconds, self.left = front, answer, left

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        return (self.base + self.decode * decodes + self.prefill * prefill_tokens) / share

    def operations_seconds(self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float) -> float:
        return self.decode * decodes + self.prefill * prefill_tokens

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        return self.embed * embeds / share

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        return self.embed * embeds

    def in_lane(self, share: float) -> float:
        return self.left

    def frontend_seconds(self, request: Request) -> float:
        return self.front


class Run:
    """Runs an engine; ``ended`` has (job, when) in the order in which they ended."""

    def __init__(
        self,
        costs: PlainCosts | None = None,
        limits: dict[str, Any] | None = None,
        watched: bool = True,
        **options: Any,
    ) -> None:
        self.sim = Simulator()
        self.ended: list[tuple[Job, float]] = []
        self._ends: dict[int, float] = {}
        self.itl = Histogram()
        self.steps: list[tuple[float, float, dict[str, float]]] = []
        self.limits = EngineLimits(**{"kv_tokens": 10**9, **(limits or {})})
        self.core = make_core(OmniSchedConfig(**options), self.limits, history=1000)
        self.engine = EngineServer(
            self.sim,
            costs or PlainCosts(),
            self.limits,
            self.core,
            self._end,
            self.itl,
            self._step if watched else None,
        )
        self.jobs: dict[int, Job] = {}

    def _end(self, job: Job) -> None:
        self.ended.append((job, self.sim.now))
        assert job.request.number not in self._ends
        self._ends[job.request.number] = self.sim.now

    def _step(self, name: str, start: float, seconds: float, **facts: float) -> None:
        self.core.validate()
        self.steps.append((start, seconds, facts))

    def serve(self, requests: Iterable[Request], until: float = float("inf")) -> "Run":
        for request in requests:
            job = self.jobs[request.number] = Job(request, 0)
            self.sim.at(request.arrival, self.engine.submit, job)
        self.sim.run(until)
        return self

    @property
    def lane_seconds(self) -> float:
        """Return the seconds that encodes take in the lane."""
        assert self.engine.ahead is not None
        return self.engine.ahead.lane.busy_seconds

    def end(self, number: int) -> float:
        """Return when a request ended."""
        return self._ends[number]
