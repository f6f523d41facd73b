"""Check combinations of keys of a scenario that are invalid together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.scenario.stages import EngineStage

if TYPE_CHECKING:
    from vllm_omni_sched.sim.scenario.scenario import Scenario


def problems_of(scenario: "Scenario") -> Iterator[str]:
    """Yield each problem in one sentence, with dotted keys and the fix."""
    yield from _of_times(scenario)
    yield from _of_stages(scenario)
    yield from _of_steps(scenario)
    yield from _of_lanes(scenario)
    yield from _of_names(scenario)
    yield from _of_host(scenario)
    yield from _of_room(scenario)


def _of_times(scenario: "Scenario") -> Iterator[str]:
    if scenario.warm_up_seconds >= scenario.duration_seconds:
        yield (
            f"'warm_up_seconds' must be below 'duration_seconds': {scenario.warm_up_seconds:g} >= "
            f"{scenario.duration_seconds:g}; nothing would be measured"
        )
    if scenario.requests is not None and scenario.workload.rate is None:
        yield "'requests' needs 'workload.rate': set it, or set 'duration_seconds' instead"
    if scenario.workload.concurrency is not None and scenario.failures:
        yield "'workload.concurrency' and 'failures' are both set: a closed loop does not model clients that fail"
    if scenario.requests is not None and scenario.workload.concurrency is not None:
        yield "'requests' and 'workload.concurrency' are both set: set 'duration_seconds' instead of 'requests'"


def _of_stages(scenario: "Scenario") -> Iterator[str]:
    """Yield problems of the order of stages."""
    stages = scenario.stages
    if not stages:
        yield "there are no stages: add [[stages]] with name and kind"
    names = [stage.name for stage in stages]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"'stages.{name}' is given twice: names of stages must differ"
    seen: dict[str, str] = {}
    for stage in stages:
        for later in {"video": ("encoder", "engine"), "encoder": ("engine",)}.get(stage.kind, ()):
            if later in seen:
                yield (
                    f"'stages.{stage.name}' of kind '{stage.kind}' comes after 'stages.{seen[later]}' of kind "
                    f"'{later}': move it before"
                )
        if isinstance(stage, EngineStage):
            yield from _of_encoder(scenario, stage, seen.get("encoder"), "engine" in seen)
        seen.setdefault(stage.kind, stage.name)
    yield from _of_sources(scenario)
    if len(out := [stage.name for stage in stages if stage.output]) > 1:
        yield f"'stages.{out[1]}.output': 'stages.{out[0]}' has it already; only one stage answers the client"


def _of_sources(scenario: "Scenario") -> Iterator[str]:
    """Yield stages that read what is not before them."""
    names = [stage.name for stage in scenario.stages]
    for at, stage in enumerate(scenario.stages):
        key, reads = f"'stages.{stage.name}.reads'", stage.reads or ()
        for name in dict.fromkeys(reads):
            if name not in names[:at]:
                where = "comes after it" if name in names[at + 1 :] else "is itself" if name in names else "is none"
                yield f"{key} names {name!r}, which {where}: name stages before it, {', '.join(names[:at]) or 'none'}"
            elif reads.count(name) > 1:
                yield f"{key} names {name!r} twice: name it once"
        if stage.reads == () and at:
            yield f"{key} is empty, but only the first stage gets the request: name a stage before it"


def _of_encoder(scenario: "Scenario", stage: EngineStage, encoder: str | None, later: bool) -> Iterator[str]:
    key = f"'stages.{stage.name}.encoder'"
    ahead = scenario.policy.encode_ahead
    if stage.encoder == "elsewhere" and encoder is None:
        yield f"{key} is 'elsewhere', but no stage of kind 'encoder' comes before it: add one, or remove the key"
    elif stage.encoder in ("in_step", "lane") and encoder is not None and not later:
        yield f"{key} is '{stage.encoder}', but 'stages.{encoder}' encodes before it: set it to 'elsewhere'"
    elif (stage.encoder == "lane" and not ahead) or (stage.encoder == "in_step" and ahead):
        on = "true" if ahead else "false"
        yield f"{key} is '{stage.encoder}', but 'policy.encode_ahead' is {on}: remove {key}, and the policy decides"


def _of_steps(scenario: "Scenario") -> Iterator[str]:
    """Yield settings that vLLM's `SchedulerConfig` refuses."""
    for stage in scenario.stages:
        if isinstance(stage, EngineStage) and stage.max_num_batched_tokens < stage.max_num_seqs:
            key, tokens = f"stages.{stage.name}.max_num_batched_tokens", stage.max_num_batched_tokens
            yield (
                f"'{key}' is {tokens}, and vLLM does not start with fewer tokens in a step than requests at once, "
                f"'max_num_seqs' {stage.max_num_seqs}: lower the one or raise the other"
            )


def _of_lanes(scenario: "Scenario") -> Iterator[str]:
    """Yield settings that the product refuses at start, in its own words."""
    if not scenario.policy.encode_ahead:
        return
    for stage in scenario.stages:
        if not isinstance(stage, EngineStage):
            continue
        # a stage with a prompt of its own length gets no items: it is a text model
        if stage.prompt_tokens is None and scenario.encoder_of(stage) == "elsewhere":
            yield (
                f"'stages.{stage.name}': encodings come from another stage, and 'policy.encode_ahead' is true; this "
                "stage has nothing to encode ahead: set it to false"
            )
            continue
        facts = LaneFacts(multimodal=stage.prompt_tokens is None, workers=stage.devices)
        if (why_not := refusal(facts)) is not None:
            what = f"'stages.{stage.name}.devices' is {stage.devices}"
            yield f"'stages.{stage.name}': {what}, and 'policy.encode_ahead' is true; {why_not}"


def _of_names(scenario: "Scenario") -> Iterator[str]:
    """Yield references to stages that do not exist."""
    names = [stage.name for stage in scenario.stages]
    spoken = [(f"failures.{at}.stage", one.stage) for at, one in enumerate(scenario.failures)]
    if scenario.autoscale is not None:
        spoken.append(("autoscale.stage", scenario.autoscale.stage))
    for key, name in spoken:
        if name not in names:
            hint = did_you_mean(name, names) or f"stages are {', '.join(names) or 'missing'}"
            yield f"'{key}': there is no stage '{name}'; {hint}"
    scale = scenario.autoscale
    if scale is not None and scale.stage in names:
        replicas = scenario.stage(scale.stage).replicas
        if not scale.minimum <= replicas <= scale.maximum:
            yield (
                f"'stages.{scale.stage}.replicas' is {replicas}, outside 'autoscale.minimum' {scale.minimum} and "
                f"'autoscale.maximum' {scale.maximum}"
            )


def _of_host(scenario: "Scenario") -> Iterator[str]:
    """Yield engines on shared cores without a calibration, which only measurements can describe."""
    for stage in scenario.stages:
        if scenario.cluster.host_cores is not None and stage.kind == "engine" and stage.calibration is None:
            yield f"'cluster.host_cores' needs a calibration of each engine: 'stages.{stage.name}' has none"


def _of_room(scenario: "Scenario") -> Iterator[str]:
    """Yield needs that exceed the cluster."""
    cluster, scale = scenario.cluster, scenario.autoscale
    most = [
        scale.maximum if scale is not None and scale.stage == stage.name else stage.replicas
        for stage in scenario.stages
    ]
    for stage in scenario.stages:
        if stage.cores_each > cluster.cores_per_node:
            yield (
                f"'stages.{stage.name}.per_replica' is {stage.cores_each}, and a node has {cluster.cores_per_node} "
                "cores: lower it, or raise 'cluster.cores_per_node'"
            )
            return
    for what, there, each in (
        ("devices", cluster.devices_per_node, [stage.devices_each for stage in scenario.stages]),
        ("cores", cluster.cores_per_node, [stage.cores_each for stage in scenario.stages]),
    ):
        needs = list(zip(scenario.stages, most, each, strict=True))
        wanted = sum(replicas * one for _, replicas, one in needs)
        if wanted > cluster.nodes * there:
            parts = ", ".join(f"{stage.name} {replicas} × {one}" for stage, replicas, one in needs if one)
            yield (
                f"the stages need {wanted} {what} ({parts}), and the cluster has {cluster.nodes * there}: set "
                f"'cluster.nodes' to {-(-wanted // there)}, or ask for less"
            )
