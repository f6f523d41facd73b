"""A scenario, with other options of its policy."""

from vllm_omni_sched.config import OmniSchedConfig, read_options
from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.result import Run
from vllm_omni_sched.sim.scenario import EngineStage, Scenario
from vllm_omni_sched.sim.tune.search import Evaluate, Measured
from vllm_omni_sched.sim.tune.space import Options


def on_scenario(scenario: Scenario, simulate: Run, fixed: Options) -> Evaluate:
    """Simulate the scenario with its ``policy`` changed, under other seeds.

    Args:
        fixed: options of every run.
    """
    own = {name: getattr(scenario.policy, name) for name in scenario.policy.model_fields_set}

    def evaluate(options: Options, seed: int) -> Measured:
        policy = read_options(OmniSchedConfig, own | fixed | options, "these options")
        result = simulate(scenario.model_copy(update={"policy": policy, "seed": seed}))
        late = result.summary()["ttft_seconds"]["p99"]
        # nobody has had a first token: as late as the run was long
        return Measured(result.attainment, result.seconds if late is None else late)

    return evaluate


def tunable(scenario: Scenario) -> EngineStage:
    """The stage whose options are searched.

    Raises:
        ConfigError: there is none.
    """
    engines = [stage for stage in scenario.stages if isinstance(stage, EngineStage)]
    if not engines:
        raise ConfigError(f"'{scenario.name}' has no stage of kind 'engine': there is nothing to tune")
    return engines[0]
