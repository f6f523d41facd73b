"""The stage scheduler's part of the screen of `doctor`."""

import json

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.cli.doctor_tables import options_table, problems_table, section, statuses_table
from vllm_omni_sched.cli.stage_diagnosis import EdgeFinding, StageFinding, StagesDiagnosis
from vllm_omni_sched.config import KEY


def stage_parts(found: StagesDiagnosis) -> list[RenderableType]:
    """Return tables of the active parts of each stage, the options, and the verdict."""
    parts: list[RenderableType] = []
    if found.options:
        parts.append(options_table(f"\nOptions of the stage scheduler, {found.file}", found.options))
    if found.pipeline:
        parts.append(statuses_table("\nStage scheduler, all stages", found.pipeline))
    parts += [_stage(stage) for stage in found.stages]
    if found.edges:
        parts.append(_edges(found.edges))
    if found.note:
        parts.append(Text(f"\n{found.note}"))
    parts.append(_verdict(found))
    return parts


def _stage(stage: StageFinding) -> Table:
    replicas = f"{stage.replicas} replica{'s' if stage.replicas > 1 else ''}"
    where = f", devices {stage.devices}" if stage.devices else ""
    return statuses_table(f"\nStage {stage.name} ({stage.stage_id}), {stage.kind}, {replicas}{where}", stage.parts)


def _edges(edges: list[EdgeFinding]) -> Table:
    table = section("\nEdges", "edge", "connector", "source")
    for edge in edges:
        extra = f" {json.dumps(edge.extra, default=str)}" if edge.extra else ""
        table.add_row(f"  {edge.edge}", (edge.connector or "–") + extra, Text(edge.source, "dim"))
    return table


def _verdict(found: StagesDiagnosis) -> RenderableType:
    if found.problems:
        return problems_table("\nCannot serve the stages", found.problems)
    if not found.active:
        return Text(f"\nThe stage scheduler is off: {found.file} has no key {KEY!r}, or it is false.")
    return Text("\nThe stage scheduler is on.")
