"""Simulate a stage that the pipeline core schedules, as it does in vLLM-Omni."""

from collections.abc import Hashable

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.choose import Chooser, RoundRobinChooser
from vllm_omni_sched.sim.pools.orchestration import Orchestration
from vllm_omni_sched.sim.pools.pool import Pool
from vllm_omni_sched.sim.pools.replicas import Make, Replica, StageSpec
from vllm_omni_sched.sim.pools.request_run import RequestRun, StageRun, work_of
from vllm_omni_sched.sim.pools.simulated_work import SimulatedWork
from vllm_omni_sched.sim.server import Job


class GatedPool(Pool):
    """Turns what happens in a stage into events of the pipeline core, and the core's actions into jobs of servers.

    The core's rules are those of `StageScheduler`.

    Args:
        shared: the core, which all stages share.
        chooser: sends each request to a replica at once, past the core's queue; None: the core decides.
    """

    def __init__(
        self,
        sim: Simulator,
        stage: int,
        spec: StageSpec,
        make: Make,
        shared: Orchestration,
        chooser: Chooser | None = None,
    ) -> None:
        self.shared = shared
        self._direct = chooser
        shared.pools[stage] = self
        self.scheduler = shared.core.add_stage(stage, spec.at_once, ())
        self._autoregressive = spec.kind is StageKind.AR
        self._runs: dict[str, RequestRun] = {}  # present in this stage
        super().__init__(sim, stage, spec, make, chooser or RoundRobinChooser())

    # ---- requests

    def submit(self, run: RequestRun) -> None:
        if not self.live and (self._direct is not None or not self.events.expects_replica(self.stage)):
            self.events.fail_stage(run, self.stage)
            return
        self._runs[run.name] = run
        run.works[self.stage] = work = SimulatedWork(
            request_id=run.name,
            stage_id=self.stage,
            known=run.known,
            arrived=self.sim.now,
            key=self._key(run),
            request_run=run,
        )
        if any(isinstance(one, e.Lead) for one in self.shared.handle(e.Submitted(work, run.features[self.stage]))):
            if self._direct is None:
                self.shared.tell(e.Waits(work))
            else:
                chosen = self._direct.choose(self.estimate(run), self.live, self.sim.now)
                self.shared.tell(e.Placed(work, chosen.index))

    def estimate(self, run: RequestRun) -> float:
        return self.shared.context.costs.estimate(str(self.stage), run.features[self.stage])

    def _key(self, run: RequestRun) -> Hashable | None:
        merges = self._direct is None and self.shared.config.graph.merging.enabled
        return work_of(run.request, self.spec.kind) if merges else None

    def release(self) -> None:
        """Start all requests that may start now."""
        self.shared.tell(e.Tick(self.stage))

    def do(self, action: e.Action) -> None:
        """Carry out an action of the core."""
        match action:
            case e.Start(SimulatedWork() as work):
                self._start(work)
            case e.Continued(_, name, SimulatedWork() as heir):
                self._inherit(self.scheduler.running[name], heir)
            case e.Stop(SimulatedWork() as work):
                self._stop(work)
                self.shared.tell(e.Dropped(self.stage, work.request_id))
            case e.Gone(SimulatedWork() as work):
                self._stop(work)
            case _:
                pass

    def _start(self, work: SimulatedWork) -> None:
        work.sent = True
        replica = self.replicas[work.replica_id]
        work.stage_run = stage_run = StageRun(work.request_run, self.stage, work.cost_seconds)
        stage_run.work = work
        self.send(stage_run, replica)

    def on_first_output(self, job: Job) -> None:
        if isinstance(job, StageRun) and job.request_run.stage_runs.get(self.stage) is job and not job.has_output:
            job.has_output = True
            assert job.work is not None
            self.shared.handle(e.FirstOutput(self.stage, job.work.request_id))
            self.release()  # waiting requests may have room now

    def finish(self, run: RequestRun, stage_run: StageRun, replica: Replica) -> None:
        assert stage_run.work is not None
        name, now = stage_run.work.request_id, self.sim.now
        if self._autoregressive and not stage_run.has_output:
            # the server does not report first outputs when they are made
            first = max(min(stage_run.first, now) - stage_run.submitted, 0.0)
            self.shared.handle(e.FirstOutput(self.stage, name, first))
        for action in self.shared.tell(e.Finished(self.stage, name)):
            if isinstance(action, e.Proceeds):
                self.events.finished(self._runs.pop(action.request_id), stage_run, action.starts)
        self.release()

    # ---- those that leave, and deaths

    def withdraw(self, run: RequestRun) -> None:
        if self._runs.pop(run.name, None) is not None:
            self.shared.tell(e.Detached(self.stage, run.name))
            self.shared.tell(e.Dropped(self.stage, run.name))
        self.release()

    def _inherit(self, work: StageWork, heir: SimulatedWork) -> None:
        """Let running work go on for another request."""
        assert isinstance(work, SimulatedWork)
        stage_run = work.stage_run
        assert stage_run is not None
        work.request_run.stage_runs.pop(self.stage, None)
        work.request_run = stage_run.request_run = heir.request_run
        heir.request_run.works[self.stage], heir.request_run.stage_runs[self.stage] = work, stage_run

    def _stop(self, work: SimulatedWork) -> None:
        if work.stage_run is not None and work.request_run.stage_runs.get(self.stage) is work.stage_run:
            self.stop(work.stage_run)

    def notice(self, index: int) -> list[RequestRun]:
        lost = super().notice(index)
        self.shared.tell(e.ReplicaDied(self.stage, index, "killed"))
        return lost

    def _serve(self, replica: Replica) -> None:
        super()._serve(replica)
        self.shared.tell(e.ReplicaUp(self.stage, replica.index))

    def add(self) -> None:
        super().add()
        self.shared.handle(e.ReplicaStarting(self.stage))

    def _started(self, nothing: None) -> None:
        self.shared.handle(e.ReplicaStarting(self.stage, on=False))
        super()._started(nothing)

    def drain(self) -> int | None:
        chosen = super().drain()
        if chosen is not None:
            self.shared.tell(e.ReplicaDraining(self.stage, chosen))
        return chosen

    def _leave_if_empty(self, replica: Replica) -> None:
        super()._leave_if_empty(replica)
        if replica.index not in self.replicas:
            self.shared.tell(e.ReplicaGone(self.stage, replica.index))

    @property
    def request_seconds(self) -> float | None:
        return self.scheduler.request_seconds

    @property
    def present(self) -> int:
        return super().present + len(self.scheduler.waiting)

    def next_waiting(self) -> RequestRun | None:
        """Return a request that waits; None if none does."""
        name = next(iter(self.scheduler.waiting), None)
        return None if name is None else self._runs[name]
