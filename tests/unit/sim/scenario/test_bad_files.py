# ruff: noqa: E501 - a row of the table each
"""Files that cannot be simulated, and what is said about each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scenarios import GOOD
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.scenario.loader import load

BAD = [
    # what is replaced, by what, and what has to be said
    ("seed = 3", "sed = 3", "unknown option 'sed'; did you mean 'seed'?"),
    ("seed = 3", "seed = 'three'", "'seed': input should be a valid integer, got 'three'"),
    ("seed = 3", "seed = ", "not valid TOML: Invalid value (at line 3"),
    ('name = "pictures on one node"', "", "'name' is missing: Description of the simulation in a line"),
    ("duration_seconds = 100", "duration_seconds = 5", "'warm_up_seconds' must be below 'duration_seconds': 10 >= 5"),
    ("ttft_seconds = 2.0", "ttft = 2.0", "unknown option 'slo.ttft'; did you mean 'slo.ttft_seconds'?"),
    ("[slo]", "[[slo]]", "'slo' must be a table, got [{"),
    ("rate = 4", "", "'workload.rate' is missing: mean requests per second of 'servegen-mm-image'"),
    ('sla = "interactive"', 'slas = "interactive"', "unknown option 'workload.slas'; did you mean 'workload.sla'?"),
    ("servegen-mm-image", "trace", "'workload.file' is missing"),
    ('kind = "servegen-mm-image"', "", "'workload.kind' is missing"),
    ('device = "a100-80gb"', 'device = "a100"', "'cluster.device': there is no device 'a100'; did you mean 'a100-40gb' or 'a100-80gb'?"),
    ('device = "a100-80gb"', "devices = 3", "unknown option 'cluster.devices'; did you mean 'cluster.device' or 'cluster.devices_per_node'?"),
    ("encode_ahead = true", "encode_ahed = true", "unknown option 'policy.encode_ahed'; did you mean 'policy.encode_ahead'"),
    ("encode_ahead = true", "waiting_order = 'slo'", "'policy.waiting_order' must be one of ['arrival', 'sla'], got 'slo'"),
    ("encode_ahead = true", "batch_min = 90", "[policy]: option 'batch_min' must not be above 'batch_max'"),
    ('policy = "least-queue"', 'policy = "best"', "[orchestration]: option 'balancing.policy' must be one of"),
    (
        "[orchestration.balancing]",
        '[orchestration.runtime.recovery]\nact_on = ["leak"]\n[orchestration.balancing]',
        "[orchestration]: 'runtime.recovery.act_on' is not simulated: remove it",
    ),
    ('kind = "video"', 'kind = "vidio"', "'stages.video.kind' must be one of ['engine', 'encoder', 'video', 'servers'], got 'vidio'; did you mean 'video'?"),
    ('kind = "video"', "", "'stages.video.kind' is missing: one of ['engine', 'encoder', 'video', 'servers']"),
    ('name = "video"', "", "'stages.0.name' is missing: Unique"),
    ('name = "video"', 'name = "llm"', "'stages.llm' is given twice: names of stages must differ"),
    ("per_replica = 16", "per_replica = 97", "'stages.video.per_replica' is 97, and a node has 96 cores"),
    ("per_replica = 16", "link = { latency = 1 }", "unknown option 'stages.video.link.latency'; did you mean 'stages.video.link.latency_seconds'?"),
    ("replicas = 8", "replicas = 8\nreads = ['vidio']", "'stages.llm.reads' names 'vidio', which is none: name stages before it, video"),
    ("replicas = 8", "replicas = 8\nreads = []", "'stages.llm.reads' is empty, but only the first stage gets the request"),
    ('model = "qwen2.5-vl-7b"', "", "in 'stages.llm': give one of 'model' and 'calibration': neither is set"),
    ('model = "qwen2.5-vl-7b"', 'model = "qwen-vl-7b"', "'stages.llm.model': there is no model 'qwen-vl-7b'; did you mean 'qwen2.5-vl-7b'?"),
    ('model = "qwen2.5-vl-7b"', 'calibration = "mine.json"', "'stages.llm.calibration': there is no file 'mine.json'"),
    ("replicas = 8", "replicas = 9", "the stages need 9 devices (llm 9 × 1), and the cluster has 8: set 'cluster.nodes' to 2"),
    ("seconds = 0.5", "seconds = 0.5\nservice = 'fixed'", "'stages.speech.service' must be one of"),
    ("seconds = 0.5", "", "'stages.speech.seconds' is missing: Mean service time of a request"),
    ('stage = "llm"', 'stage = "lm"', "'failures.0.stage': there is no stage 'lm'; did you mean 'llm'?"),
    ("[[failures]]", "[failures]", "'failures' must be a list of tables, [[failures]], got {"),
    ("[[failures]]", "[autoscale]\nmaximum = 4", "'stages.llm.replicas' is 8, outside 'autoscale.minimum' 1 and 'autoscale.maximum' 4"),
    ('name = "speech"\nkind = "servers"\nseconds = 0.5', 'name = "later"\nkind = "video"', "'stages.later' of kind 'video' comes after 'stages.llm' of kind 'engine': move it before"),
    ("[[failures]]", "[autoscale]\nminimum = 5\nmaximum = 2", "in 'autoscale': 'minimum' must not be above 'maximum': 5 > 2"),
    ("[[failures]]", "[classes.realtime]\nttft_seconds = 1\n[[failures]]", "'classes.realtime.itl_seconds' is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("was", "now", "said"), BAD)
def test_a_bad_file_is_told(tmp_path: Path, was: str, now: str, said: str) -> None:
    assert was in GOOD
    path = tmp_path / "one.toml"
    path.write_text(GOOD.replace(was, now, 1))
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert said in message
    assert message.startswith("one.toml: ")
    assert "\n" not in message


def test_a_workload_of_videos_needs_a_stage_that_decodes_them(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    stage = '[[stages]]\nname = "video"\nkind = "video"\nper_replica = 16\n'
    assert stage in GOOD
    text = GOOD.replace(stage, "").replace("servegen-mm-image", "video-clips")
    path.write_text(text)
    with pytest.raises(ConfigError, match="no stage of kind 'video' decodes its videos: add one"):
        load(path)


def test_so_does_a_workload_made_of_one(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    nested = GOOD.replace('sla = "interactive"', 'of = { kind = "video-clips" }').replace(
        "servegen-mm-image", "day-night"
    )
    path.write_text(nested)
    assert load(path).workload.kind == "day-night"
    path.write_text(nested.replace('kind = "video"', 'kind = "servers"\nseconds = 1').replace("per_replica = 16", ""))
    with pytest.raises(ConfigError, match="no stage of kind 'video' decodes its videos: add one"):
        load(path)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        GOOD.replace("encode_ahead", "ahead").replace("seed", "sed").replace("replicas = 8", "replicas = 0")
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    for key in ("'sed'", "'policy.ahead'", "'stages.llm.replicas'"):
        assert key in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        load(path)


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ("{a=", "}")])
def test_one_that_is_nested_too_deeply_is_named(tmp_path: Path, opens: str, closes: str) -> None:
    (tmp_path / "deep.toml").write_text(f"seed = {opens * 5000}1{closes * 5000}\n")
    with pytest.raises(ConfigError, match=r"deep\.toml: values are nested too deeply"):
        load(tmp_path / "deep.toml")
