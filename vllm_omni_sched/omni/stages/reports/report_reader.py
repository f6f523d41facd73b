"""Read the reports of stage processes in the front end, as facts of replicas and edges."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_omni_sched.engine.metrics.files import live_pages
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.omni.stages.reports.stage_reporter import reports_base


class Moved(NamedTuple):
    """Transfers of one process's connectors on one side of an edge since its last report."""

    replica: tuple[int, int]
    from_stage: int
    to_stage: int
    side: str
    messages: int
    nbytes: int
    seconds: float
    failed: int


class ReportReader:
    """Adds the changes in each report to the board.

    Args:
        board: the board to update.
        base: directory of the reports; None: that of the stages of this process.
    """

    def __init__(self, board: StageBoard, base: Path | None = None) -> None:
        self._board, self._base = board, base
        self._before: dict[str, Mapping[str, Any]] = {}  # the last report of each process

    def read(self, replicas: Mapping[tuple[int, int], Iterable[int]]) -> list[Moved]:
        """Read all reports.

        Args:
            replicas: the processes of each replica, by stage and replica id; reports of other processes are ignored.

        Returns:
            New transfers on edges.
        """
        owners = {pid: replica for replica, pids in replicas.items() for pid in pids}
        device: dict[tuple[int, int], int] = {}
        now: dict[str, Mapping[str, Any]] = {}
        moved: list[Moved] = []
        for _, page in live_pages(self._base or reports_base()):
            try:
                report = json.loads(page)
                name, chain = report["processes"][0], [int(one.partition("@")[0]) for one in report["processes"]]
            except (ValueError, KeyError, IndexError):
                continue  # it is incomplete
            replica = next((owners[pid] for pid in chain if pid in owners), None)
            if replica is None:
                continue
            now[name] = report
            moved += self._add(replica, report, self._before.get(name, {}))
            if report["device_bytes"] is not None:
                device[replica] = device.get(replica, 0) + report["device_bytes"]
        self._before.update(now)  # a report that is incomplete this time is remembered
        for (stage, index), held in device.items():
            self._board.memory(stage, index, held, None)
        return moved

    def _add(self, replica: tuple[int, int], report: Mapping[str, Any], before: Mapping[str, Any]) -> list[Moved]:
        moved: list[Moved] = []
        for name, sums in report["edges"].items():
            edge, _, side = name.partition(" ")
            from_stage, _, to_stage = edge.partition(">")
            new = _less(sums, before.get("edges", {}).get(name))
            if not (from_stage.isdigit() and to_stage.isdigit()) or not any(new):
                continue  # nothing new, or an edge of something that is not a stage
            key = int(from_stage), int(to_stage)
            if not set(key) <= self._board.stages.keys():
                continue
            messages, nbytes, seconds, failed = new
            if messages:
                self._board.moved(*key, side, int(messages), int(nbytes), seconds)
            moved.append(Moved(replica, *key, side, int(messages), int(nbytes), seconds, int(failed)))
        for cache, sums in report["caches"].items():
            hits, lookups = _less(sums, before.get("caches", {}).get(cache))
            self._board.cache(*replica, cache, int(hits), int(lookups - hits))
        return moved


def _less(sums: Iterable[float], before: Iterable[float] | None) -> list[float]:
    if before is None:
        return list(sums)
    return [max(new - old, 0) for new, old in zip(sums, before, strict=True)]
