"""Run one simulation from a scenario to its result."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni_sched.config.errors import OmniSchedError
from vllm_omni_sched.resource.engine.lane import WhereReason
from vllm_omni_sched.sim.cluster import Cluster
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Progress, Record, Result, Sample
from vllm_omni_sched.sim.output import Spans
from vllm_omni_sched.sim.pools.autoscale import ForecastScaler
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import EncoderStage

_EVENTS = 20_000  # between two calls of `progress`
_SAMPLES, _FEWEST = 200, 40  # of a timeline, while requests arrive
_LOOKS = 20_000  # replicas sampled in total: a large cluster has fewer samples
_SPARSER = 0.1  # of the time since the end of arrivals: interval between samples


def simulate(scenario: Scenario, progress: Progress | None = None, spans: Spans | None = None) -> Result:
    """Run a scenario to its end: until all requests have left, or ``drain_seconds`` after the last arrival.

    Args:
        progress: called now and then with the simulated seconds and the events so far.
        spans: records what happened when, for a trace.

    Raises:
        ConfigError: a model does not fit on its devices, a file cannot be read, or a request fits nowhere.
    """
    with _no_collections():
        return _Run(scenario, spans).run(progress)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable the cyclic garbage collector.

    A run makes no cycles per request, and each collection would scan all engines.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Run:
    def __init__(self, scenario: Scenario, spans: Spans | None) -> None:
        self._scenario = scenario
        self._sim = Simulator()
        self._records: list[Record] = []
        self._cluster = Cluster(scenario, self._sim, self._record, spans)
        self._timeline: list[Sample] = []
        self._at_start: dict[str, dict[str, float]] = {}
        self._held_at_start: dict[str, float] = {}
        self._served_at_start: dict[str, tuple[float, float]] = {}
        self._operations_at_start: tuple[float, float] | None = None  # with the seconds of accelerators, as below
        self._operations: tuple[float, float] | None = None  # at the last sample while requests arrive
        self._changes_at_start: Counter[str] = Counter()
        self._pools = self._cluster.pipeline.pools
        self._units = {stage.name: getattr(stage, "per_replica", 1) for stage in scenario.stages}
        self._next_sample = 0.0
        replicas = sum(pool.held for pool in self._pools)
        self._every = scenario.duration_seconds / min(max(_LOOKS // replicas, _FEWEST), _SAMPLES)
        self._sim.at(scenario.warm_up_seconds, self._warm)
        self._sim.at(0.0, self._sample)

    def run(self, progress: Progress | None) -> Result:
        sim, scenario, pipeline = self._sim, self._scenario, self._cluster.pipeline
        drain = scenario.drain_seconds
        until = float("inf") if drain is None else scenario.duration_seconds + drain
        while sim.run(until, _EVENTS) and sim.now < until:
            if progress is not None:
                progress(sim.now, sim.events)
            if not pipeline.active():  # only clocks are left
                break
        self._check()
        return self._result()

    def _record(self, record: Record) -> None:
        if record.arrival >= self._scenario.warm_up_seconds:
            self._records.append(record)

    def _warm(self, _: None) -> None:
        """Start to measure at the end of the warm-up."""
        for pool in self._pools:
            self._at_start[pool.spec.name] = pool.busy_seconds()
            self._held_at_start[pool.spec.name] = pool.replica_seconds()
            self._served_at_start[pool.spec.name] = pool.serving_seconds, pool.empty_seconds
        self._operations_at_start = self._computed()
        self._changes_at_start = self._changes()
        self._cluster.itl.clear()

    def _sample(self, _: None) -> None:
        now, active = self._sim.now, self._cluster.pipeline.active()
        if now >= self._next_sample or not active:
            serving = {pool.spec.name: pool.serving for pool in self._pools}
            self._timeline.append(Sample(now, serving))
            # once no more requests arrive, the rest may take many times as long
            late = now >= self._scenario.duration_seconds
            is_last = not active or now + self._every >= self._scenario.duration_seconds
            if is_last and not late:
                self._operations = self._computed()
            self._next_sample = now + (_SPARSER * (now - self._scenario.duration_seconds) if late else 0.0)
        if active:
            self._sim.after(self._every, self._sample)

    def _computed(self) -> tuple[float, float] | None:
        """Return the accelerator seconds so far that operations would take without waiting, and those held."""
        done = held = 0.0
        for pool, stage in zip(self._pools, self._scenario.stages, strict=True):
            held += pool.replica_seconds() * stage.devices_each
            if isinstance(stage, EncoderStage):
                done += pool.busy_seconds()["encode"] * stage.devices_each
        for stage, engine in self._cluster.engines_by_stage():
            seconds = engine.operations_seconds()
            if seconds is None:
                return None
            done += seconds * stage.devices_each
        return done, held

    def _operations_part(self) -> float | None:
        if self._operations is None or self._operations_at_start is None:
            return None
        held = self._operations[1] - self._operations_at_start[1]
        return (self._operations[0] - self._operations_at_start[0]) / held if held > 0 else None

    def _check(self) -> None:
        """Check that every request that arrived has left once or is present.

        Raises:
            OmniSchedError: a request was lost, which is a defect of the simulator.
        """
        pipeline = self._cluster.pipeline
        if pipeline.arrived != pipeline.done + pipeline.failed + pipeline.in_flight:
            raise OmniSchedError(
                f"{pipeline.arrived} requests arrived, {pipeline.done} ended, {pipeline.failed} failed and "
                f"{pipeline.in_flight} are in flight, which does not add up: please report this with the scenario"
            )

    def _changes(self) -> Counter[str]:
        """Return counts of what happened to replicas so far, and of forecasts."""
        counts: Counter[str] = Counter()
        for pool in self._pools:
            name = pool.spec.name
            counts.update({f"{name}_deaths": pool.deaths, f"{name}_started": pool.added, f"{name}_stopped": pool.gone})
        scaler = self._cluster.scaler
        if isinstance(scaler, ForecastScaler):
            counts.update({f"forecast_{said}": bins for said, bins in scaler.forecast_counts.items()})
            counts["forecast_guard_trips"] = scaler.guard_trips
        return counts

    def _availability(self) -> dict[str, dict[str, float]]:
        found = {}
        for pool in self._pools:
            name = pool.spec.name
            held = pool.replica_seconds() - self._held_at_start.get(name, 0.0)
            served, without = self._served_at_start.get(name, (0.0, 0.0))
            if pool.deaths and held:
                found[name] = {
                    "serving": (pool.serving_seconds - served) / held,
                    "seconds_without_any": pool.empty_seconds - without,
                }
        return found

    def _result(self) -> Result:
        scenario, cluster, sim = self._scenario, self._cluster, self._sim
        busy, held, devices = {}, {}, {}
        for pool in self._pools:
            name = pool.spec.name
            now, before = pool.busy_seconds(), self._at_start.get(name, {})
            busy[name] = {work: seconds - before.get(work, 0.0) for work, seconds in now.items()}
            seconds = pool.replica_seconds() - self._held_at_start.get(name, 0.0)
            held[name] = seconds * self._units[name]
            devices[name] = seconds * scenario.stage(name).devices_each
        counters: Counter[str] = Counter()
        for engine in cluster.engine_servers():
            counters["preempted"] += engine.preempted
            if engine.core.lending is not None:
                counters.update({f"kv_loans_{one.value}": n for one, n in engine.core.lending.reasons.items()})
            counters["encoder_cache_hits"] += engine.encoding.hits
            counters["encoded_in_step"] += engine.encoding.encoded
            for reason in WhereReason:
                name = f"encode_{reason.where.value}_{reason.value}"
                counters[name] += engine.core.metrics.placements[reason.value]
        counters.update(self._changes() - self._changes_at_start)
        return Result(
            scenario.name,
            scenario.seed,
            scenario.slo,
            self._records,
            cluster.itl,
            sim.now,
            max(scenario.duration_seconds - scenario.warm_up_seconds, 1e-9),
            sim.events,
            steps=sum(engine.decodes.steps for engine in cluster.engine_servers()),
            lost=cluster.pipeline.in_flight,
            busy_seconds=busy,
            held_seconds=held,
            device_seconds=devices,
            counters={name: n for name, n in sorted(counters.items()) if n},
            sources=cluster.sources,
            classes=scenario.classes,
            timeline=self._timeline,
            availability=self._availability(),
            operations=self._operations_part(),
        )
