"""Change the policy options of a scenario."""

from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, load_config
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.result import Run
from vllm_omni_sched.sim.scenario import EngineStage, Scenario
from vllm_omni_sched.sim.scenario.checks import problems_of
from vllm_omni_sched.sim.tune.search import Evaluate, Measured
from vllm_omni_sched.sim.tune.space import Options


def own_options(scenario: Scenario) -> Options:
    """Return the options in the scenario's ``[policy]``, in the form of an options file."""
    options: dict[str, Any] = scenario.policy.model_dump(mode="json", exclude_unset=True)
    return options


def with_options(scenario: Scenario, options: Options) -> Scenario:
    """Return the scenario as served with exactly these options.

    Raises:
        ConfigError: a server would refuse them; the message says why.
    """
    policy = load_config({KEY: dict(options)})
    # where items are encoded follows from the policy, as in a server
    stages = tuple(
        stage.model_copy(update={"encoder": None})
        if isinstance(stage, EngineStage) and stage.encoder in ("lane", "in_step")
        else stage
        for stage in scenario.stages
    )
    changed = scenario.model_copy(update={"policy": policy, "stages": stages})
    for problem in problems_of(changed):
        raise ConfigError(problem)
    return changed


def on_scenario(scenario: Scenario, simulate: Run) -> Evaluate:
    """Return a function that simulates the scenario with exactly the given options, under other seeds."""

    def evaluate(options: Options, seed: int) -> Measured:
        result = simulate(with_options(scenario, options).model_copy(update={"seed": seed}))
        late = result.summary()["ttft_seconds"]["p99"]
        # no request has had a first token: as late as the run was long
        return Measured(result.attainment, result.seconds if late is None else late)

    return evaluate


def tunable(scenario: Scenario) -> EngineStage:
    """Return the stage whose options are searched.

    Raises:
        ConfigError: there is no such stage.
    """
    engines = [stage for stage in scenario.stages if isinstance(stage, EngineStage)]
    if not engines:
        raise ConfigError(f"'{scenario.name}' has no stage of kind 'engine': there is nothing to tune")
    return engines[0]


def has_lane(scenario: Scenario) -> bool:
    """Return whether all engines that have the encoder may encode ahead."""
    engines = [stage for stage in scenario.stages if isinstance(stage, EngineStage)]
    return not any(
        scenario.encoder_of(stage) == "elsewhere" or refusal(LaneFacts(workers=stage.devices)) is not None
        for stage in engines
        if stage.prompt_tokens is None
    )
