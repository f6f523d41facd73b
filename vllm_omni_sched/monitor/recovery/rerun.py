"""Plan which stages of an interrupted request run again."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter


@dataclass(frozen=True)
class Rerun:
    """Stages to run again. ``stages``: each after those it needs. ``resume``: those of them that can start at once."""

    stages: tuple[int, ...]
    resume: tuple[int, ...]


def plan_rerun(stage: int, sources: Mapping[int, Sequence[int]], held: Collection[int]) -> Rerun:
    """Return the stages to run so that ``stage`` gets done.

    A finished stage is not run again while its output is in ``held``; if it is not held, its own sources are checked,
    and so on to the nearest held outputs, or to the entry. ``sources``: the stages that each stage reads, a DAG.
    """
    needs: dict[int, list[int]] = {}
    pending = [stage]
    while pending:
        one = pending.pop()
        if one not in needs:
            needs[one] = [source for source in sources.get(one, ()) if source not in held]
            pending += needs[one]
    resume = sorted(one for one, missing in needs.items() if not missing)
    return Rerun(tuple(TopologicalSorter(needs).static_order()), tuple(resume))
