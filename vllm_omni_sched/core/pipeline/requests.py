"""Describe requests on their way through a pipeline, and their work in one stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vllm_omni_sched.config.stage_options.graph import ClassTargets, PriorityOptions
from vllm_omni_sched.graph.flow import RequestFlow
from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.resource.pipeline.stage_cost import Features

UNPLACED = -1
"""Replica of work that waits, or of a request that follows the work of another one."""

_ITEM = "item "  # begins the keys of items


def item_key(identifier: object) -> str:
    """Return the key of a multimodal item, for `PipelineRequest.keys`.

    Args:
        identifier: is equal for items with the same content.
    """
    return f"{_ITEM}{identifier}"


@dataclass(eq=False, slots=True)
class PipelineRequest:
    """A request from its arrival at the pipeline until it leaves.

    ``keys``: of data that other requests may share, such as its user and its items (`item_key`).
    ``path``: the stages that it visits, in order; None: all that can be reached from where it enters.
    ``features`` and ``costs``: by stage, where known. ``replicas``: the replicas whose output it got, by stage.
    ``flow``: its progress, if stages form more than a line; None: its driver goes along the line.
    """

    request_id: str
    arrival: float
    sla: SlaClass
    low: bool = False
    priority: int = 0
    modality: str = "text"
    keys: frozenset[str] = frozenset()
    path: tuple[int, ...] | None = None
    features: dict[int, Features] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    replicas: dict[int, int] = field(default_factory=dict)
    flow: RequestFlow | None = None

    @property
    def item_keys(self) -> frozenset[str]:
        """Return those of its keys that are of items."""
        return frozenset(key for key in self.keys if key.startswith(_ITEM))

    def path_from(self, stage_id: int) -> list[str] | None:
        """Return the stages that it visits from this one on, by name; None if that is not known."""
        if self.path is None:
            return None
        return [str(one) for one in self.path[self.path.index(stage_id) :]]


@dataclass(eq=False, kw_only=True)
class StageWork:
    """A request in one stage. Drivers subclass it to add what their engine needs to run it.

    ``arrived``: when it came to the stage. ``key``: of its content, if requests with the same content may share the
    work. ``bound``: the replica that was prepared for it; None: any. ``replica_id``: where it runs, else `UNPLACED`.
    ``sent``: whether the replica has it; set by the driver. ``has_output``: whether it has any.
    """

    request_id: str
    stage_id: int
    known: PipelineRequest
    arrived: float
    cost_seconds: float = 0.0
    key: object = None
    bound: int | None = None
    replica_id: int = UNPLACED
    started: float | None = None
    runs: int = 0
    sent: bool = False
    has_output: bool = False

    def reset(self) -> None:
        """Forget the run on a replica, before it runs again."""
        self.replica_id, self.started, self.has_output = UNPLACED, None, False


class RequestClasses:
    """The classes of requests that the options define, by name."""

    def __init__(self, options: PriorityOptions) -> None:
        self.by_name = {
            name: SlaClass(name, _path_seconds(each), math.inf, each.rank) for name, each in options.classes.items()
        }
        ranks = {each.rank for each in self.by_name.values()}
        self._lowest = max(ranks) if len(ranks) > 1 else math.inf
        self.default = self.by_name[options.default_class]
        self._by_modality = {modality: self.by_name[name] for modality, name in options.by_modality.items()}

    def usual(self, modality: str) -> SlaClass:
        """Return the class of requests of this modality that name none."""
        return self._by_modality.get(modality, self.default)

    def named(self, name: str, modality: str) -> SlaClass:
        """Return the class of that name; if there is none, the usual class of the modality."""
        return self.by_name.get(name) or self.usual(modality)

    def is_low(self, sla: SlaClass) -> bool:
        """Return whether the class gets only its share while requests of others wait."""
        return sla.rank >= self._lowest


def _path_seconds(targets: ClassTargets) -> float:
    """Return the seconds from the arrival of a request to its deadline on the whole path."""
    given = targets.ttft_ms if targets.e2e_ms is None else targets.e2e_ms
    return math.inf if given is None else given / 1e3
