"""Where a request goes on whose stage was interrupted."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter


@dataclass(frozen=True)
class Rerun:
    """``stages``: all that have to run, each after those it needs. ``resume``: those of them that can start at once."""

    stages: tuple[int, ...]
    resume: tuple[int, ...]


def plan_rerun(stage: int, sources: Mapping[int, Sequence[int]], held: Collection[int]) -> Rerun:
    """What to run so that ``stage`` is done.

    A finished stage is not run again while its output is in ``held``; where it is not, its own sources are looked at,
    and so on to the nearest that are held, or to the entry. ``sources``: the stages each stage reads, a DAG.
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
