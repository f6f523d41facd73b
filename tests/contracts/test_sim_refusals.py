"""What the engine refuses to start, the simulator refuses to simulate, in the same words."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import SchedulerConfig

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.start import attach_encode_ahead
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.study.plan import load_study

STUDIES = sorted((Path(__file__).parents[2] / "benchmarks/studies").glob("*.toml"))

SCENARIO = """
name = "one"
[workload]
kind = "servegen-mm-image"
rate = 1.0
{more}
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
devices = {devices}
"""
AHEAD = "[policy]\nencode_ahead = true\n"
APART = '[[stages]]\nname = "eyes"\nkind = "encoder"\nmodel = "qwen2.5-vl-7b"\n'


def workers(number: int) -> SimpleNamespace:
    """The parallelism of an engine whose workers split every layer between them."""
    return SimpleNamespace(
        world_size=number, tensor_parallel_size=number, data_parallel_size=1, distributed_executor_backend="mp"
    )


def engine(**sections: Any) -> SimpleNamespace:
    """What `attach_encode_ahead` looks at, of an engine on CUDA that has nothing against it."""
    return SimpleNamespace(
        **{
            "model_config": SimpleNamespace(is_multimodal_model=True, is_encoder_decoder=False, multimodal_config=None),
            "parallel_config": workers(1),
            "device_config": SimpleNamespace(device_type="cuda"),
            "compilation_config": SimpleNamespace(compile_mm_encoder=False),
            "ec_transfer_config": None,
            "speculative_config": None,
            "lora_config": None,
            "weight_transfer_config": None,
            **sections,
        }
    )


def words_of_the_engine(**sections: Any) -> str:
    """What the engine says when it refuses to start."""
    with pytest.raises(ConfigError) as caught:
        attach_encode_ahead(engine(**sections))
    return str(caught.value)


def scenario(tmp_path: Path, more: str = AHEAD, devices: int = 1) -> Path:
    path = tmp_path / "one.toml"
    path.write_text(SCENARIO.format(more=more, devices=devices))
    return path


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_encode_ahead_on_several_devices(tmp_path: Path, devices: int) -> None:
    said = words_of_the_engine(parallel_config=workers(devices))
    with pytest.raises(ConfigError) as caught:
        load(scenario(tmp_path, devices=devices))
    assert str(caught.value).endswith(said)
    assert f"one.toml: 'stages.llm': 'stages.llm.devices' is {devices}" in str(caught.value)


def test_encode_ahead_behind_encoders_apart(tmp_path: Path) -> None:
    """The engine would start, and encode what its connector does not bring; in the simulator it always brings it."""
    with pytest.raises(ConfigError) as caught:
        load(scenario(tmp_path, AHEAD + APART))
    assert str(caught.value).endswith(
        "one.toml: 'stages.llm': encodings come from another stage, and 'policy.encode_ahead' is true; this stage has "
        "nothing to encode ahead: set it to false"
    )


@pytest.mark.parametrize(
    "more",
    [
        '[sweep]\n"stages.llm.devices" = [1, 2]\n',
        '[[variants]]\nname = "two"\nset = { "stages.llm.devices" = 2 }\n',
    ],
)
def test_a_point_of_a_study_that_the_engine_refuses(tmp_path: Path, more: str) -> None:
    said = words_of_the_engine(parallel_config=workers(2))
    path = scenario(tmp_path)
    path.write_text(path.read_text() + more)
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert said in str(caught.value)


def test_an_override_that_the_engine_refuses(tmp_path: Path) -> None:
    said = words_of_the_engine(parallel_config=workers(2))
    with pytest.raises(ConfigError) as caught:
        load_study(scenario(tmp_path), {"stages.llm.devices": 2})
    assert said in str(caught.value)


def test_several_devices_without_encode_ahead_and_encode_ahead_on_one(tmp_path: Path) -> None:
    assert load(scenario(tmp_path, "", devices=4)).stage("llm").devices_each == 4
    assert load(scenario(tmp_path)).policy.encode_ahead
    attach_encode_ahead(config := engine())
    assert config.ec_transfer_config is not None


@pytest.mark.parametrize(("tokens", "requests"), [(255, 256), (256, 256), (1, 1), (1, 2)])
def test_a_step_of_fewer_tokens_than_requests(tmp_path: Path, tokens: int, requests: int) -> None:
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": requests}
    changed = {f"stages.llm.{name}": value for name, value in limits.items()}
    path = scenario(tmp_path, "")
    if tokens >= requests:
        SchedulerConfig(max_model_len=128, is_encoder_decoder=False, **limits)
        load(path, changed)
        return
    with pytest.raises(ValidationError, match="must be greater than or equal to max_num_seqs"):
        SchedulerConfig(max_model_len=128, is_encoder_decoder=False, **limits)
    with pytest.raises(ConfigError, match=f"'stages.llm.max_num_batched_tokens' is {tokens}, and vLLM does not start"):
        load(path, changed)


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.stem)
def test_the_engine_starts_with_what_each_study_simulates(study: Path) -> None:
    for point in load_study(study).points:
        run = point.scenario()
        for stage in run.stages:
            if stage.kind == "engine" and run.policy.encode_ahead:
                assert run.encoder_of(stage) != "elsewhere"
                attach_encode_ahead(engine(parallel_config=workers(stage.devices)))
