"""The choice of the processors for process lanes.

vLLM binds the threads of a CPU worker to one hardware thread of each core, and leaves a core to the scheduler and the
front end, which need little of it. A lane on the remaining processors takes little from decode steps.
"""

import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import CPU_LIST

SHARED, AUTO = "shared", "auto"
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_OPENMP = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY")


@dataclass(frozen=True)
class Processors:
    """The processors of a process lane, and its number of threads.

    ``own``: whether the LLM's threads are bound to none of them.
    """

    cpus: frozenset[int]
    threads: int
    own: bool


def choose(
    option: str, allowed: Iterable[int], bound: Iterable[int], siblings: Callable[[int], Iterable[int]], threads: int
) -> tuple[Processors, ...]:
    """Return the processors of each lane, the fastest lane first.

    1. A list gives one lane on exactly these processors.
    2. ``auto`` gives one lane on the cores that the LLM is not bound to, with a thread on each, if these are at least
       half as many as the LLM's; hardware threads of the LLM's cores do not count. A second lane uses the LLM's
       processors in the time that the LLM leaves.
    3. Otherwise, and with ``shared``, there is one lane on the LLM's processors, with as many threads.

    Args:
        option: ``auto``, ``shared``, or a list such as ``1,4-7``.
        allowed: processors that this engine may use.
        bound: processors that the LLM's threads are bound to.
        siblings: returns all hardware threads of a processor's core.
        threads: number of threads of the LLM.

    Raises:
        ConfigError: the list has a processor that is not allowed.
    """
    allowed, bound = frozenset(allowed), frozenset(bound)
    check_listed(option, allowed | bound)
    if option not in (AUTO, SHARED):
        wanted = parse(option)
        return (Processors(wanted, len(wanted), not wanted & bound),)
    shared = Processors(bound or allowed, threads, own=False)
    busy = {cpu for one in bound for cpu in siblings(one)} | bound
    free = {cpu for cpu in allowed - busy if cpu == min(allowed.intersection(siblings(cpu)), default=cpu)}
    if option == AUTO and free and 2 * len(free) >= len(bound):
        return Processors(frozenset(free), len(free), own=True), shared
    return (shared,)


def check_listed(option: str, allowed: Iterable[int]) -> None:
    """Check that the processors of a list may be used; ``option`` as for `choose`.

    Raises:
        ConfigError: the list has a processor that is not allowed.
    """
    allowed = frozenset(allowed)
    if option not in (AUTO, SHARED) and (missing := parse(option) - allowed):
        raise ConfigError(
            f"option 'encode_lane_cpus' has {_shown(missing)}, but this process may use {_shown(allowed)} only"
        )


def together(lanes: Sequence[Processors]) -> Processors | None:
    """Return the processors of all lanes, for an item that is alone; None where it is better on those of its lane.

    1. There is one lane only, or none.
    2. The first lane has as many processors as the LLM, so that it is as quick as a step of stock vLLM. On all of them,
       each operation of the encoder would wait for the slowest thread, and the engine core needs a processor, too: on
       one processor each, an encode of 0.22 s took between 0.2 and 0.8 s.
    """
    if len(lanes) < 2 or lanes[0].threads >= lanes[1].threads:
        return None
    cpus = frozenset().union(*(one.cpus for one in lanes))
    return Processors(cpus, len(cpus), own=False)


def beside_the_llm(lanes: Sequence[Processors]) -> list[int]:
    """Return the processors that an encode in the step may use beside the LLM's own: those of lanes of their own.

    1. Only where another lane shares the LLM's processors, as `choose` gives them: what an operator has listed for the
       lane stays the lane's.
    """
    if all(one.own for one in lanes):
        return []
    return sorted(cpu for one in lanes if one.own for cpu in one.cpus)


@dataclass(frozen=True)
class Part:
    """One of several ranks whose lanes share the processors of a machine.

    ``bound``: processors that the LLM's threads are bound to, on all ranks.
    """

    rank: int
    ranks: int
    bound: frozenset[int]


def choose_part(
    option: str,
    allowed: Iterable[int],
    bound: Iterable[int],
    siblings: Callable[[int], Iterable[int]],
    threads: int,
    part: Part,
) -> tuple[Processors, ...]:
    """Return the processors of the only lane of one rank, by the rules of `choose`.

    1. The processors of a list, or those that the LLM leaves on all ranks, are dealt out to the ranks in turn.
    2. A rank whose lane shares processors with the LLM shares those of its own worker.

    Args:
        option: as for `choose`.
        allowed: processors that this engine may use.
        bound: processors that the LLM's threads of this rank are bound to.
        siblings: as for `choose`.
        threads: number of threads of the LLM of this rank.
        part: which rank it is.

    Raises:
        ConfigError: the list has a processor that is not allowed, or fewer processors than there are ranks.
    """
    (whole, *_) = choose(option, allowed, part.bound, siblings, threads)
    listed = option not in (AUTO, SHARED)
    enough = len(whole.cpus) >= part.ranks
    if listed and not enough:
        raise ConfigError(
            f"option 'encode_lane_cpus' has {_shown(whole.cpus)}, but each of {part.ranks} ranks needs a processor"
        )
    if listed or (whole.own and enough):
        mine = frozenset(sorted(whole.cpus)[part.rank :: part.ranks])
        return (Processors(mine, len(mine), whole.own),)
    return choose(SHARED, allowed, bound, siblings, threads)


def parse(text: str) -> frozenset[int]:
    """Parse a list of processors such as ``1,4-7``.

    Raises:
        ConfigError: the text is not such a list.
    """
    if not CPU_LIST.fullmatch(text):
        raise ConfigError(f"option 'encode_lane_cpus' must be 'auto', 'shared' or a list such as '1,4-7', got {text!r}")
    ends = [[int(number) for number in part.split("-")] for part in text.split(",")]
    return frozenset(cpu for part in ends for cpu in range(part[0], part[-1] + 1))


def allowed_here() -> set[int]:
    """Return the processors that this process may use; includes the parent's, as OpenMP may have bound this thread."""
    here = os.sched_getaffinity(0)
    if multiprocessing.parent_process() is not None:
        here |= os.sched_getaffinity(os.getppid())
    return here


def usable_here() -> set[int]:
    """Return the processors that workers of this process may use: its own, and those that vLLM is told to bind."""
    return allowed_here() | _processors_in(os.environ.get(_BIND, ""))


def _processors_in(text: str) -> set[int]:
    return {cpu for part in re.findall(r"\d+(?:-\d+)?", text) for cpu in parse(part)}


def bound_here() -> set[int]:
    """Return the processors that this process's threads are bound to, or will be once OpenMP has started them."""
    bound = set()
    for task in Path("/proc/self/task").iterdir():
        bound |= os.sched_getaffinity(int(task.name))
    places = {cpu for name in _OPENMP for cpu in _processors_in(os.environ.get(name, ""))}
    return places & allowed_here() or bound


def siblings_of(cpu: int) -> frozenset[int]:
    """Return all hardware threads of a processor's core; only itself if the system does not tell."""
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        return parse(listed)
    except (OSError, ConfigError):
        return frozenset({cpu})


def move_here(cpus: Iterable[int]) -> None:
    """Move all threads of this process to these processors, including those that OpenMP has bound to others."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)


def _shown(cpus: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cpus)))
