"""Represent a request on its way through the stages, its work in one stage, and what an orchestrator can know of it."""

from dataclasses import dataclass, field

from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork, item_key
from vllm_omni_sched.graph.flow import FlowPlan, RequestFlow
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.pipeline.stage_cost import Features
from vllm_omni_sched.sim.video import frames_of
from vllm_omni_sched.sim.work import Job, Request


@dataclass(slots=True, eq=False)
class RequestRun:
    """Represents a request from its arrival until it leaves.

    ``path``: its stages, in topological order; ``flow``: its progress. ``stage_runs``: its work on servers or dead
    replicas now, by stage. ``costs`` and ``features``: by stage, where estimated. ``known``, ``works``: the request,
    and its present work by stage, as the pipeline core knows them. ``answer``: time of the client's first output, and
    the largest gap after it. ``dispatched``: stages where it was on a replica; ``repeats``: dispatches beyond the first
    in each. ``in_transit``: number of inputs on their way, by stage. ``gone``: it has left.
    """

    request: Request
    plan: FlowPlan
    repeats: int = 0
    answer: tuple[float, float] = (float("inf"), 0.0)
    gone: bool = False
    stage_runs: "dict[int, StageRun]" = field(default_factory=dict)
    dispatched: set[int] = field(default_factory=set)
    in_transit: dict[int, int] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    features: dict[int, Features] = field(default_factory=dict)
    works: dict[int, StageWork] = field(default_factory=dict)
    name: str = field(init=False)
    path: tuple[int, ...] = field(init=False)
    flow: RequestFlow = field(init=False)
    known: PipelineRequest = field(init=False)

    def __post_init__(self) -> None:
        self.name = str(self.request.number)
        self.path = self.plan.stages
        self.flow = RequestFlow(self.plan, consumes=False)


class StageRun(Job):
    """Represents the job of a request in a stage.

    ``has_output``: whether it has put anything out; ``work``: the job as the pipeline core knows it.
    """

    __slots__ = ("has_output", "request_run", "work")

    def __init__(self, run: RequestRun, stage: int, cost_seconds: float) -> None:
        super().__init__(run.request, stage, cost_seconds, attempt=0)
        self.request_run = run
        self.has_output = False
        self.work: StageWork | None = None


UNKNOWN_TOKENS = 128
"""Expected output tokens of a request, whose actual number is unknown in advance."""


"""Pixels of a picture that become one embedding, as in Qwen2-VL."""


def features_of(request: Request, kind: StageKind) -> Features:
    """Return the features of a request in one stage. ``pixels``: of all frames of its clips, except for LLM stages."""
    items = request.items
    autoregressive = kind is StageKind.AR
    pixels = 0
    if not autoregressive:
        clips = [item.clip for item in items if item.clip is not None]
        pixels = sum(frames_of(clip) * clip.width * clip.height for clip in clips)
    return Features(
        prompt_tokens=request.prompt_tokens,
        output_tokens=UNKNOWN_TOKENS if autoregressive else 0,
        items=len(items),
        pixels=pixels,
    )


def keys_of(request: Request) -> frozenset[str]:
    """Return keys of data that other requests may share: the client, if known (not 0), and multimodal items."""
    keys = {item_key(item.content) for item in request.items}
    if request.client:
        keys.add(f"user {request.client}")
    return frozenset(keys)


def work_of(request: Request, kind: StageKind) -> tuple[int, ...] | None:
    """Return the content of its work if another request may have the same; None if that is not known.

    The output of decoders and encoders depends on the items alone. Of prompts only the lengths are known here.
    """
    if kind is StageKind.AR or not request.items:
        return None
    return tuple(item.content for item in request.items)


@dataclass(eq=False, kw_only=True)
class SimulatedWork(StageWork):
    """Represents the work of a simulated request in a stage.

    ``request_run``: the request that leads; ``stage_run``: its job on a server.
    """

    request_run: RequestRun
    stage_run: StageRun | None = None
