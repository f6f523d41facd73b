"""Compare calibrated costs with the answers of a server whose clients send requests of all kinds at once."""

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.fit import Observations, ServedRequest
from vllm_omni_sched.sim.costs.measured import write_calibration
from vllm_omni_sched.sim.measure import Outcome
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import build
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, write_trace

_RANGE, _HALVINGS = (0.25, 4.0), 10  # the last is of less than 0.3 %


@dataclass(frozen=True)
class Served:
    """The engine of a server, for its simulation.

    Attributes:
        stage: options of an engine stage: `max_num_seqs`, `lane_on` and so on.
        policy: options of the scheduler; none: stock.
    """

    stage: Mapping[str, Any]
    policy: Mapping[str, Any] = field(default_factory=dict)


def under_load(
    costs: dict[str, Any], kv_tokens: int, seen: Observations, server: Served, with_lane: Served
) -> dict[str, float]:
    """Return how many times as long as the costs say everything takes while requests of all kinds come at once.

    The requests that were measured are simulated with the same times and sizes. The factor is that with which half of
    them take longer than simulated, from sending to the last token, and half less. Loads that measure one kind of work
    at a time do not show what it costs that all are on the same cores and caches.

    Args:
        costs: as `fit.fit` returns them.
        server: the server without encode-ahead. ``with_lane``: the other one.

    Returns:
        For ``"server"`` and ``"with_lane"``, if such loads were measured, and encodes in the lane; from 1/4 to 4.

    Raises:
        ConfigError: the simulator does not know an option, or no request ends.
    """
    embeds = {point.modality: point.embeds // point.items for point in seen.encodes}
    found = {}
    for name, of, starts in (("server", server, seen.starts), ("with_lane", with_lane, seen.lane_starts)):
        loads = [load for start in starts for load in start.mixed if load]
        if loads and (name == "server" or costs["encode_in_lane"]):
            with tempfile.TemporaryDirectory() as folder:
                found[name] = _factor(Path(folder), costs, kv_tokens, loads, embeds, name, of)
    return found


def _factor(
    folder: Path,
    costs: dict[str, Any],
    kv_tokens: int,
    loads: Sequence[Sequence[ServedRequest]],
    embeds: Mapping[str, int],
    name: str,
    of: Served,
) -> float:
    loads = [sorted(load, key=lambda one: one.at) for load in loads]
    for number, load in enumerate(loads):
        header = Header(FORMAT, VERSION, source="vllm-omni-sched calibrate")
        write_trace(folder / f"{number}.jsonl", header, [_line(one, embeds) for one in load])
    least, most = _RANGE
    for _ in range(_HALVINGS):
        factor = math.sqrt(least * most)
        write_calibration(folder / "costs.json", {}, {**costs, "under_load": {name: factor}}, kv_tokens)
        ratios = [
            one.seconds / took
            for number, load in enumerate(loads)
            for one, took in zip(load, _simulated(folder, number, load, of), strict=True)
            if took
        ]
        if not ratios:
            raise ConfigError("no request of the loads of all kinds ends in a simulation with these costs")
        least, most = (factor, most) if statistics.median(ratios) > 1 else (least, factor)
    return math.sqrt(least * most)


def _line(one: ServedRequest, embeds: Mapping[str, int]) -> Exact:
    items = ((one.modality, embeds[one.modality]),) * one.items if one.items else ()
    text = max(one.prompt_tokens - sum(size for _, size in items), 0)
    return Exact(round(one.at, 6), text, one.output_tokens, items)


def _simulated(folder: Path, number: int, load: Sequence[ServedRequest], of: Served) -> list[float]:
    """Return the seconds of each request; 0 for one that does not end well."""
    raw = {
        "name": "a server under load",
        "seed": number,
        "duration_seconds": load[-1].at + 1.0,
        "warm_up_seconds": 0.0,
        "policy": dict(of.policy),
        "workload": {"kind": "trace", "file": f"{number}.jsonl"},
        "stages": [{"kind": "engine", "name": "llm", "calibration": "costs.json", **of.stage}],
    }
    result = simulate(build(raw, "the calibration's check under load", folder))
    records = sorted(result.records, key=lambda record: record.number)
    return [record.end - record.arrival if record.outcome is Outcome.DONE else 0.0 for record in records]
