"""Simulate an engine that shares the cores of a host with other stages."""

from typing import Any

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.server import EngineServer, Watcher
from vllm_omni_sched.sim.kernel import Action, Host, Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.work import Done, Job

_Outputs = tuple[int, int, list[Job], list[Job]]
"""Epoch, number of decoding requests, jobs with a first token, jobs with their last one."""


class HostedEngine(EngineServer):
    """Models an engine on the cores of a host.

    1. A step is a thread on the host's cores, slowed down beside others as its calibration says.
    2. A request is work of the host's front end before it enters the engine, delayed while engines run
       as its calibration says; and so are the outputs of each step
       before clients have them. ``answer_seconds`` of the costs pass before the front end is told of a step's end.
    3. Times to the first token and between tokens are those of clients, after the front end.
    """

    def __init__(
        self,
        sim: Simulator,
        costs: MeasuredCosts,
        limits: EngineLimits,
        core: EngineCore,
        done: Done,
        itl: Histogram,
        host: Host,
        watcher: Watcher | None = None,
        on_first_output: Done | None = None,
    ) -> None:
        super().__init__(sim, costs, limits, core, done, Histogram(), watcher)
        self._front_costs = costs
        self._host, self._clients, self._on_first_output = host, itl, on_first_output
        self._run = self._on_cores
        self._leaps = False
        self._firsts: list[Job] = []
        self._lasts: list[Job] = []
        self._told_at = 0.0

    def _on_cores(self, seconds: float, action: Action, argument: Any) -> None:
        self._host.cores.run(seconds, self._front_costs.beside_seconds(), action, argument)

    def _to_front(self, seconds: float, came: tuple[int, Job]) -> None:
        working = self._host.cores.running
        beside = self._front_costs.calibration.frontend.beside
        if working and beside:
            self._sim.after(beside[min(working, len(beside)) - 1], self._woken_front, (seconds, came))
        else:
            self._woken_front((seconds, came))

    def _woken_front(self, asked: tuple[float, tuple[int, Job]]) -> None:
        seconds, came = asked
        self._host.front(seconds, self._enter, came)

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        decoding = self.decodes.number
        super()._end(epoch)
        outputs = decoding + len(self._firsts)
        if not outputs:  # a part of a prompt
            return
        message = (outputs, (epoch, decoding, self._firsts, self._lasts))
        self._firsts, self._lasts = [], []
        self._sim.after(self._costs.answer_seconds, self._noticed, message)

    def _say(self, job: Job, at: float) -> None:
        self._firsts.append(job)

    def _answer(self, job: Job) -> None:
        self._lasts.append(job)

    def _noticed(self, message: tuple[int, _Outputs]) -> None:
        number, outputs = message
        self._host.front(self._front_costs.outputs_seconds(number), self._told, outputs)

    def _told(self, outputs: _Outputs) -> None:
        epoch, decoding, firsts, lasts = outputs
        if epoch != self._epoch:
            return
        now = self._sim.now
        if decoding:
            self._clients.add(now - self._told_at, decoding)
        self._told_at = now
        for job in firsts:
            job.first = now
            if self._on_first_output is not None:
                self._on_first_output(job)
        for job in lasts:
            self._answered((epoch, job))
