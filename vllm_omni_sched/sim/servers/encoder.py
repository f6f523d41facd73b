"""Simulate an encoder on a device of its own."""

from collections import deque

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.server import Done, Job
from vllm_omni_sched.sim.work import Item


class EncoderServer:
    """Encodes items in batches, apart from the LLM: the encode instance of EPD disaggregation.

    (Singh et al., "Efficiently Serving Large Multimodal Models Using EPD Disaggregation", ICML 2025.)

    1. Items wait in the order in which their requests arrived, first come first served.
    2. A batch is the first waiting items of one modality, at most ``batch_items``; one batch at a time.
    3. A request is done with its last item; one without items is done at once.

    Raises:
        ConfigError: ``batch_items`` is below 1.
    """

    __slots__ = ("_batch", "_began", "_busy", "_costs", "_done", "_ends", "_left", "_most", "_sim", "_waiting")

    def __init__(self, sim: Simulator, done: Done, costs: EngineCosts, batch_items: int = 8) -> None:
        if batch_items < 1:
            raise ConfigError(f"batch_items must be 1 or more, got {batch_items}")
        self._sim, self._done, self._costs, self._most = sim, done, costs, batch_items
        self._waiting: deque[tuple[Job, Item]] = deque()
        self._left: dict[Job, int] = {}  # items of each job that are not encoded yet
        self._batch: list[Job] = []
        self._began = 0.0
        self._ends = -1.0  # of the running batch
        self._busy = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._left)

    def submit(self, job: Job) -> None:
        items = job.request.items
        self._left[job] = len(items)
        if not items:
            self._sim.after(0.0, self._finish, job)
            return
        self._waiting.extend((job, item) for item in items)
        self._next()

    def _finish(self, job: Job) -> None:
        if self._left.get(job) != 0:  # it was withdrawn
            return
        del self._left[job]
        job.first = self._sim.now
        self._done(job)

    def _next(self) -> None:
        if self._ends >= 0 or not self._waiting:
            return
        waiting, batch = self._waiting, self._batch
        modality, embeds = waiting[0][1].modality, 0
        while waiting and len(batch) < self._most and waiting[0][1].modality == modality:
            job, item = waiting.popleft()
            batch.append(job)
            embeds += item.embeds
        self._began = self._sim.now
        self._ends = self._began + self._costs.encode_seconds(modality, embeds, len(batch))
        self._sim.at(self._ends, self._end)

    def _end(self, _: None) -> None:
        if self._sim.now != self._ends:
            return
        batch, self._batch = self._batch, []
        self._busy += self._ends - self._began
        self._ends = -1.0
        for job in batch:
            if job in self._left:  # otherwise it was withdrawn while it was encoded
                self._left[job] -= 1
        self._next()
        for job in dict.fromkeys(batch):
            self._finish(job)

    def abort(self, job: Job) -> None:
        """Forget a job; its items in the running batch are still encoded, since a batch cannot be split."""
        if self._left.pop(job, None) is not None:
            self._waiting = deque(one for one in self._waiting if one[0] is not job)

    def kill(self) -> list[Job]:
        self._busy, self._ends = self.busy_seconds()["encode"], -1.0
        lost = list(self._left)
        self._left.clear()
        self._waiting.clear()
        self._batch.clear()
        return lost

    def busy_seconds(self) -> dict[str, float]:
        return {"encode": self._busy + (self._sim.now - self._began if self._ends >= 0 else 0.0)}
