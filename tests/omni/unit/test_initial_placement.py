"""Stages start where the best plan on their profiles puts them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
from vllm_omni.engine.stage_runtime import StageRuntime

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_yaml import VARIABLE, check_against, read_stage_options
from vllm_omni_sched.omni.stages.placement import initial_placement
from vllm_omni_sched.omni.stages.reports import stage_reporter
from vllm_omni_sched.omni.stages.start import hooks

pytestmark = pytest.mark.omni

DEVICES = {0: {"memory_bytes": 100}, 1: {"memory_bytes": 100}}
PROFILES = {"thinker": {"memory_bytes": 40, "seconds": 1.0}, 1: {"memory_bytes": 40, "seconds": 1.0}}


def stages(*devices: str, replicas: int = 1) -> list[Any]:
    """Return the configurations of stages on these devices, the last one with so many replicas."""
    counts = [1] * (len(devices) - 1) + [replicas]
    return [
        SimpleNamespace(model_stage=name, runtime_config=SimpleNamespace(devices=each, num_replicas=count))
        for name, each, count in zip(("thinker", "talker", "vocoder"), devices, counts, strict=False)
    ]


def placed(configs: list[Any], **partition: Any) -> list[str]:
    options = read_stage_options({"graph": {"partition": {"enabled": True, **partition}}}, "the test")
    initial_placement.assign_initial_devices(options.graph.partition, configs)
    return [config.runtime_config.devices for config in configs]


def test_the_slow_one_gets_the_fast_device() -> None:
    fast = DEVICES | {1: {"memory_bytes": 100, "speed": 4.0}}
    slow = PROFILES | {1: {"memory_bytes": 40, "seconds": 9.0}}
    assert placed(stages("0", "0"), devices=fast, profiles=slow)[1] == "1"


def test_what_fits_nowhere_is_refused_with_what_is_missing() -> None:
    large = PROFILES | {1: {"memory_bytes": 130, "seconds": 1.0}}
    with pytest.raises(ConfigError, match=r"graph\.partition.*stage 1 lacks 30 bytes.*profiles"):
        placed(stages("0", "0"), devices=DEVICES, profiles=large)


def test_a_payload_of_no_stage_is_refused() -> None:
    options = read_stage_options({"graph": {"partition": {"payload_bytes": {"thinker->taker": 1}}}}, "the test")
    with pytest.raises(ConfigError, match=r"payload_bytes\.thinker->taker.*'taker'; did you mean 'talker'"):
        check_against(options, {0: "thinker", 1: "talker"})


def test_a_profile_of_no_stage_is_refused() -> None:
    options = read_stage_options({"graph": {"partition": {"profiles": {"taker": PROFILES[1]}}}}, "the test")
    with pytest.raises(ConfigError, match=r"graph\.partition\.profiles\.taker.*did you mean 'talker'"):
        check_against(options, {0: "thinker", 1: "talker"})


@pytest.mark.parametrize("on", [True, False])
def test_the_engine_asks_before_it_starts_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, on: bool) -> None:
    started: list[list[str]] = []

    def theirs(self: Any, timeout: int) -> None:
        started.append([config.runtime_config.devices for config in self.stage_configs])

    monkeypatch.setattr(AsyncOmniEngine, "_initialize_stages", theirs)
    for owner, name in ((AsyncOmniEngine, "_create_orchestrator"), (StageRuntime, "_build_logical_stage_init_plans")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be as they were, afterwards
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(stage_reporter.VARIABLE, "")
    for _ in range(2):
        hooks.hook()
    profile = "{memory_bytes: 40, seconds: 1.0}"
    devices = "devices: {0: {memory_bytes: 100}, 1: {memory_bytes: 100}}"
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(
        f"omni_sched: {{graph: {{partition: {{enabled: {str(on).lower()}, {devices}, "
        f"profiles: {{0: {profile}, 1: {profile}}}}}}}}}\n"
    )
    engine = SimpleNamespace(config_path=str(deploy), stage_configs=stages("0", "0"))
    AsyncOmniEngine._initialize_stages(engine, 1)
    assert [sorted(each) for each in started] == [["0", "1"] if on else ["0", "0"]]
    assert os.environ[stage_reporter.VARIABLE] == str(os.getpid()), "stages are to report"
