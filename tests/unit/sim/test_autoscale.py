"""What a scenario says of scaling is what scales."""

from vllm_omni_sched.sim.cluster import Cluster
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.autoscale import ForecastScaler, ReactiveScaler
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.scenario import Scenario

SERVERS = {"name": "llm", "kind": "servers", "per_replica": 4, "devices": 1, "replicas": 2}


def scenario(mode: str, **more: object) -> Scenario:
    scale = {"stage": "llm", "maximum": 6, "mode": mode, "start_seconds": 5.0, "every_seconds": 5.0, **more}
    stage = SERVERS | {"seconds": 1.0, "service": "exponential"}
    return Scenario.model_validate(
        {
            "name": "scaled",
            "duration_seconds": 300.0,
            "workload": {"kind": "poisson", "rate": 6.0},
            "stages": [stage],
            "autoscale": scale,
        }
    )


def scaler(one: Scenario) -> ReactiveScaler | ForecastScaler | None:
    return Cluster(one, Simulator(), lambda record: None, None).scaler


def test_modes_differ_in_who_decides_and_whether_the_guard_is_heard():
    assert isinstance(scaler(scenario("reactive")), ReactiveScaler)
    heard = scaler(scenario("forecast", capacity=4.0))
    unheard = scaler(scenario("forecast-unguarded", capacity=4.0))
    assert isinstance(heard, ForecastScaler)
    assert isinstance(unheard, ForecastScaler)
    assert [one.forecast.options.guarded for one in (heard, unheard)] == [True, False]
    assert heard.forecast.options.guard_window == unheard.forecast.options.guard_window


def test_how_long_replicas_are_kept_is_as_the_scenario_says_in_each_mode():
    reactive = scaler(scenario("reactive", stabilisation_seconds=40.0))
    ahead = scaler(scenario("forecast", stabilisation_seconds=40.0))
    assert isinstance(reactive, ReactiveScaler)
    assert isinstance(ahead, ForecastScaler)
    assert reactive.options.stabilisation_seconds == 40.0
    assert ahead.planner.options.cooldown_seconds == 40.0


def test_what_forecasts_said_and_what_became_of_replicas_is_in_the_result():
    result = simulate(scenario("forecast", capacity=2.0, utilisation=0.8))
    said = {name: count for name, count in result.counters.items() if name.startswith("forecast_model_")}
    why = {name: count for name, count in result.counters.items() if name.startswith("forecast_because_")}
    assert sum(said.values()) == sum(why.values()) == 60  # one modality, a word each 5 s
    assert result.counters["llm_started"] >= 2
    assert max(sample.serving["llm"] for sample in result.timeline) == 6
