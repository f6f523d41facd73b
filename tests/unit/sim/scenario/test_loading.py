"""Files that can be simulated, overrides, and what a scenario answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios import GOOD
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig, OrderMode
from vllm_omni_sched.config.stage_options import BalancePolicy
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import _resolve, apply, flatten, load
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import ServersStage
from vllm_omni_sched.sim.workloads.trace import Exact, Header, write_trace


def read(tmp_path: Path, text: str = GOOD, **overrides: Any) -> Scenario:
    path = tmp_path / "one.toml"
    path.write_text(text)
    return load(path, overrides)


def test_a_file_becomes_a_scenario_with_the_real_options(tmp_path: Path) -> None:
    one = read(tmp_path)
    assert one.policy == OmniSchedConfig(encode_ahead=True)
    assert one.orchestration is not None
    assert one.orchestration.balancing.policy is BalancePolicy.LEAST_QUEUE
    assert one.workload.options == {"sla": "interactive"}
    assert [stage.name for stage in one.stages] == ["video", "llm", "speech"]
    assert one.output_stage == 2
    assert (one.duration_seconds, one.drain_seconds) == (100.0, None)


def test_what_a_study_says_is_left_aside(tmp_path: Path) -> None:
    more = GOOD + '[sweep]\n"workload.rate" = [1.0]\n[search]\nkind = "nonsense"\n'
    assert read(tmp_path, more) == read(tmp_path)


def test_without_policy_it_is_stock(tmp_path: Path) -> None:
    text = GOOD.replace("[policy]\nencode_ahead = true", "").replace(
        '[orchestration.balancing]\npolicy = "least-queue"', ""
    )
    one = read(tmp_path, text)
    assert one.policy == OmniSchedConfig()
    assert one.orchestration is None


def test_overrides_name_stages_and_entries(tmp_path: Path) -> None:
    one = read(
        tmp_path,
        **{
            "stages.llm.replicas": 4,
            "stages.1.max_num_seqs": 32,
            "failures.0.kind": "rack",
            "policy": {"waiting_order": "sla"},
            "slo": {"ttft_seconds": 1.0},
            "workload.rate": 9,
            "orchestration.runtime.credits": {"enabled": True, "capacity": 7},
            "stages.speech.seconds": 0.25,
        },
    )
    assert one.stage("llm").replicas == 4
    assert one.stages[1].max_num_seqs == 32  # type: ignore[union-attr]
    assert one.failures[0].kind == "rack"
    assert one.policy.waiting_order is OrderMode.SLA
    assert one.policy.encode_ahead is True  # the rest of the table stays
    assert (one.slo.ttft_seconds, one.slo.itl_seconds) == (1.0, 0.1)
    assert one.workload.rate == 9
    assert one.orchestration is not None
    assert one.orchestration.runtime.credits.capacity == 7
    speech = one.stage("speech")
    assert isinstance(speech, ServersStage)
    assert speech.seconds == 0.25


def test_an_empty_table_empties(tmp_path: Path) -> None:
    assert read(tmp_path, policy={}).policy == OmniSchedConfig()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("stages.lm.replicas", "there is no 'stages.lm'; did you mean 'stages.llm'?"),
        ("stages.7.replicas", "there is no 'stages.7'; there are video, llm, speech"),
        ("stages.llm", "'stages.llm' is an entry; name a key of it"),
        ("seed.more", "'seed.more' cannot be set: 'seed' is 3, no table"),
        ("stages..replicas", "'stages..replicas' is not a dotted key"),
        ("workload.tempo", "unknown option 'workload.tempo'"),
        ("stages.llm.replica", "unknown option 'stages.llm.replica'; did you mean 'stages.llm.replicas'?"),
    ],
)
def test_overrides_that_lead_nowhere(tmp_path: Path, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **{key: 1})
    assert said in str(caught.value)


def test_overrides_leave_the_original(tmp_path: Path) -> None:
    raw = {"stages": [{"name": "llm", "replicas": 1}], "slo": {"ttft_seconds": 1.0}}
    changed = apply(raw, {"stages.llm.replicas": 2, "slo.ttft_seconds": 3.0}, "here")
    assert changed == {"stages": [{"name": "llm", "replicas": 2}], "slo": {"ttft_seconds": 3.0}}
    assert raw == {"stages": [{"name": "llm", "replicas": 1}], "slo": {"ttft_seconds": 1.0}}


def test_dotted_and_nested_keys_are_the_same() -> None:
    nested = {"policy": {"encode_ahead": True, "video": {}}, "slo.ttft_seconds": 1}
    assert flatten(nested) == {"policy.encode_ahead": True, "policy.video": {}, "slo.ttft_seconds": 1}


def test_files_are_named_from_where_the_scenario_lies(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    write_trace(tmp_path / "week.jsonl", Header("vllm-omni-sched trace", 1), [Exact(0.1, 9, 3, ())])
    one = read(tmp_path, GOOD.replace('model = "qwen2.5-vl-7b"', 'calibration = "mine.json"').replace(
        'kind = "servegen-mm-image"\nrate = 4\nsla = "interactive"', 'kind = "trace"\nfile = "week.jsonl"'
    ))  # fmt: skip
    assert one.stages[1].calibration == str(tmp_path / "mine.json")  # type: ignore[union-attr]
    assert one.workload.options == {"file": str(tmp_path / "week.jsonl")}
    assert one.workload.rate is None


@pytest.mark.parametrize(
    ("ahead", "before", "where"),
    [(False, False, "in_step"), (True, False, "lane"), (False, True, "elsewhere")],
)
def test_where_items_are_encoded_follows_the_policy_and_the_stages(
    tmp_path: Path, ahead: bool, before: bool, where: str
) -> None:
    encoder = '[[stages]]\nname = "eyes"\nkind = "encoder"\nmodel = "qwen2.5-vl-7b"\n[[stages]]\nname = "llm"'
    text = GOOD.replace('[[stages]]\nname = "llm"', encoder) if before else GOOD
    one = read(tmp_path, text.replace("replicas = 8", "replicas = 7"), policy={"encode_ahead": ahead})
    engine = one.stage("llm")
    assert one.encoder_of(engine) == where  # type: ignore[arg-type]


def test_one_stage_may_be_said_to_answer(tmp_path: Path) -> None:
    assert read(tmp_path, **{"stages.llm.output": True}).output_stage == 1
    with pytest.raises(ConfigError, match=r"'stages\.llm\.output': 'stages\.video' has it already"):
        read(tmp_path, **{"stages.llm.output": True, "stages.video.output": True})


VIDEO = """
name = "clips"
[workload]
kind = "video-clips"
rate = 1.0
[[stages]]
name = "video"
kind = "video"
{video}
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
"""


@pytest.mark.parametrize(
    ("video", "decoders"),
    [
        ('decoders = "nvdec"\ncollaborative = false', 2),  # vLLM's hw_decoders
        ('decoders = "nvdec"\ncollaborative = false\nper_replica = 5', 5),
        ('decoders = "nvdec"', 8),
        ("collaborative = false", 8),
    ],
)
def test_stock_decodes_on_a_gpu_with_as_many_decoders_as_vllm_has_by_default(
    tmp_path: Path, video: str, decoders: int
) -> None:
    path = tmp_path / "clips.toml"
    path.write_text(VIDEO.format(video=video))
    assert load(path).stage("video").per_replica == decoders  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("video", "said"),
    [
        (
            'decoders = "nvdec"\ncollaborative = false\nper_replica = 6',
            "'stages.video.per_replica' is 6, but the a100-80gb that an API server decodes on has 5 video engines",
        ),
        (
            'decoders = "nvdec"\nper_replica = 41',
            "'stages.video.per_replica' is 41, but a node of 8 a100-80gb has 40 video engines",
        ),
    ],
)
def test_there_are_no_more_video_engines_than_the_gpus_have(tmp_path: Path, video: str, said: str) -> None:
    path = tmp_path / "clips.toml"
    path.write_text(VIDEO.format(video=video))
    with pytest.raises(ConfigError, match=said):
        load(path)


SMALL = """
name = "small"
duration_seconds = 1.0
[workload]
kind = "trace"
file = "requests.jsonl"
[cluster]
device = "h100-80gb"
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-3b"
"""


def test_files_are_relative_to_the_scenario_wherever_it_is_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.toml").write_text(SMALL)
    header = Header("vllm-omni-sched trace", 1, source="test")
    write_trace(tmp_path / "inner" / "requests.jsonl", header, [Exact(0.1, 9, 3, ())])
    monkeypatch.chdir(tmp_path)
    one = load(Path("inner/one.toml"))
    found = simulate(one)
    assert [record.output_tokens for record in found.records] == [3]


def test_files_of_workloads_inside_others_are_relative_to_the_scenario_too(tmp_path: Path) -> None:
    values = {"workload": {"kind": "mix", "parts": [{"kind": "trace", "file": "a.jsonl"}, {"kind": "text"}]}}
    _resolve(values, tmp_path)
    assert values["workload"]["parts"][0]["file"] == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("more", "served", "seconds"), [
    ("", 2, 900.9), ("scale = 2.0", 2, 450.45), ("repeat = 2", 4, 1801.8),
])  # fmt: skip
def test_a_trace_is_simulated_to_its_end(tmp_path: Path, more: str, served: int, seconds: float) -> None:
    text = SMALL.replace("duration_seconds = 1.0\n", "").replace("[cluster]", f"{more}\n[cluster]")
    (tmp_path / "one.toml").write_text(text)
    header = Header("vllm-omni-sched trace", 1, source="test")
    write_trace(tmp_path / "requests.jsonl", header, [Exact(0.1, 9, 3, ()), Exact(600.6, 9, 3, ())])
    one = load(tmp_path / "one.toml")
    assert one.duration_seconds == pytest.approx(seconds)
    assert len(simulate(one).records) == served
