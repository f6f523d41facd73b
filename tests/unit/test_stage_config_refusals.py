"""Options of the stage scheduler: every refusal names file, key, value and fix."""

from pathlib import Path

import pytest

from tests.support.stage_files import deploy
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_yaml import VARIABLE, check_against, load_stage_config, read_stage_options

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "stages.yaml"


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ({"talkr": {}}, "'batching.stages.talkr': there is no such stage; did you mean 'talker'?"),
        ({"qqqq": {}}, "no such stage; known stages: 0, 1, thinker, talker"),
        ({"talker": {}, 1: {}}, "'batching.stages.talker' and 'batching.stages.1' are for the same stage: merge them"),
    ],
)
def test_unknown_stages_are_refused(stages, says):
    config = read_stage_options({"batching": {"stages": stages}}, "here")
    with pytest.raises(ConfigError, match=says):
        check_against(config, {0: "thinker", 1: "talker"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchin: {}", "'omni_sched': unknown option 'batchin'; did you mean 'batching'?"),
        ("batching: {max_batch: 3}", "unknown option 'batching.max_batch'; did you mean 'batching.max_batch_size'?"),
        ("runtime: {recovery: {restarts: 3}}", "did you mean 'runtime.recovery.restart'?"),
        ("runtime: {credits: {capacity: 0}}", "'runtime.credits.capacity'.*got 0; the nearest valid value is 1"),
        ("runtime: {credits: {capacity: '8'}}", "'runtime.credits.capacity': .*valid integer, got '8'"),
        (
            "runtime: {connectors: {local: {extra: {}}}}",
            "'runtime.connectors.local.name' is missing: Registered",
        ),
        ("runtime: {connectors: {local: 3}}", "'runtime.connectors.local' must be a mapping of name, extra, got 3"),
        ("runtime: {connectors: {local: {name: a, extras: {}}}}", "did you mean 'runtime.connectors.local.extra'?"),
        (
            "runtime: {connectors: {a: {name: A}}, edges: {x->y: b}}",
            r"in 'runtime': option 'edges.x->y' must be one of the connectors \['a'\], got 'b'",
        ),
        (
            "runtime: {connectors: {a: {name: A}}, edges: {xy: a}}",
            "'edges.xy' must name two stages, such as 'thinker->",
        ),
        (
            "runtime: {connectors: {a: {name: A}, b: {name: B}}, edges: {x->y: b}}",
            "'connectors.a' is on no edge; name an edge for it in 'edges', or remove it",
        ),
        ("batching: {latency_target: 50 parsecs}", "'batching.latency_target': '50 parsecs' is not a duration: give a"),
        ("latency_target: 0ms", "option 'latency_target': .*greater than 0, got '0ms'"),
        (
            "latency_target: 1ms, batching: {target_latency_ms: 1}",
            "in 'batching': options 'latency_target' and 'target",
        ),
        (
            "batching: {stages: {talker: {adjustment_interval: 1, adjust_interval_ms: 2}}}",
            "in 'batching.stages.talker': options 'adjustment_interval' and 'adjust_interval_ms' are the same",
        ),
        (
            "max_batch_size: 3, batching: {max_batch_size: 3}",
            "'max_batch_size' and 'batching.max_batch_size' are the same",
        ),
        ("text_pool_size: 1MB, pools: 3", "option 'pools' must be a mapping of text_pool_size, .*, got 3"),
        (
            "pools: {image_pool_size: 2 GBytes}",
            "option 'pools.image_pool_size': '2 GBytes' is not a size: give bytes, or",
        ),
        ("audio_pool_size: 12", "option 'audio_pool_size': .*; the nearest valid value is 65536"),
        ("pools: {text_pool_sizes: 1MB}", "unknown option .*; did you mean 'pools.text_pool_size'?"),
        ("pool_growth_factor: 1", "option 'pool_growth_factor': .*greater than 1, got 1"),
        ("monitoring: {enabled: false, forecast: {enabled: true}}", "'forecast.enabled' needs 'enabled': turn both on"),
        (
            "graph: {priority: {classes: {vip: {rank: -1}}}}",
            "'graph.priority.classes.vip.rank'.*nearest .* is 0",
        ),
        ("graph: {priority: {classes: {vip: {ttft_ms: 0}}}}", "classes.vip.ttft_ms'.*greater than 0, got 0"),
        ("graph: {priority: {classes: {}}}", "'graph.priority.classes'"),
        (
            "graph: {priority: {default_class: vip}}",
            r"'default_class' must be one of the classes \['realtime', .* got 'vip'",
        ),
        (
            "graph: {priority: {by_modality: {audio: vip}}}",
            "in 'graph.priority': option 'by_modality.audio' must be one of .* got 'vip'",
        ),
        (
            "monitoring: {anomaly: {max_stage_seconds: 0.5}}",
            "'monitoring.anomaly.max_stage_seconds'.*got 0.5; the nearest valid value is 1",
        ),
        ("batching: {target_latency_ms: .inf}", "'batching.target_latency_ms': .*finite number, got inf"),
        ("graph: 3", "option 'graph' must be a mapping of merging, priority, affinity, partition, got 3"),
        ("batching: {stages: 3}", "option 'batching.stages' must be a mapping, got 3"),
        ("batching: {min_batch_size: 40}", "'min_batch_size' must not be above 'max_batch_size': 40 > 32"),
        (
            "batching: {max_batch_size: 16}",
            "in 'batching': option 'max_batch_size' needs 'target_latency_ms': name",
        ),
        ("batching: {stages: {talker: {memory_high: 1}}}", "unknown option 'batching.stages.talker.memory_high'"),
        (
            "batching: {stages: {talker: {max_batch_size: 4}}}",
            "'stages.talker.max_batch_size' needs 'target_latency_ms",
        ),
        ("batching: {progressive: {enabled: true}}", "'progressive.enabled' needs 'target_latency_ms'"),
        ("batching: {progressive: {growth: 3.0}}", "in 'batching.progressive': option 'growth' needs 'enabled': turn"),
        ("runtime: {credits: {capacity: 8}}", "in 'runtime.credits': option 'capacity' needs 'enabled': turn that on"),
        (
            "batching: {max_batch_size: 4, stages: {talker: {min_batch_size: 5}}}",
            "in 'batching': option 'stages.talker.min_batch_size' must not be above .*: 5 > 4; lower the one",
        ),
        (
            "balancing: {policy: costs}",
            "'balancing.policy' must be one of .* got 'costs'; did you mean 'cost'",
        ),
        (
            "batching: {1: 2}",
            "deploy.yaml: 'omni_sched': option 'batching': its keys must be text, got 1; put it in quotes",
        ),
        ("runtime: {recovery: {3: 2}}", "option 'runtime.recovery': its keys must be text, got 3"),
        ("batching: {on: 3}", "option 'batching': its keys must be text, got True; .* takes a bare on"),
        ("on: 3", "names of options must be text, got True; put it in quotes"),
        ("runtime: {connectors: {1: {name: a}}}", "option 'runtime.connectors': its keys must be text, got 1"),
        ("runtime: {edges: {yes: a}}", "option 'runtime.edges': its keys must be text, got True"),
        ("batching: {stages: {talker: {7: 1}}}", "option 'batching.stages.talker': its keys must be text, got 7"),
        (
            "monitoring: {forecast: {move_replicas: true}}",
            "'monitoring.forecast': .* 'move_replicas' needs 'enabled': turn",
        ),
        (
            "graph: {priority: {by_modality: {audoi: realtime}}}",
            "in 'graph.priority.by_modality': option 'audoi' must be one of the modalities .*; did you mean 'audio'",
        ),
        (
            "graph: {priority: {classes: {vip: {ttft_ms: 300, e2e_ms: 200}}, default_class: vip}}",
            "in 'graph.priority.classes.vip': option 'ttft_ms' must not be above 'e2e_ms': 300 > 200; lower",
        ),
        (
            "runtime: {recovery: {hang_seconds: 5}}, monitoring: {anomaly: {enabled: false}}",
            "'runtime.recovery.hang_seconds' is 5, but without 'monitoring.anomaly.enabled' nothing .* or set .* null",
        ),
        (
            "runtime: {recovery: {hang_seconds: 5}}, monitoring: {enabled: false}",
            "'runtime.recovery.hang_seconds' is 5, but without 'monitoring.enabled' nothing",
        ),
        ("runtime: {recovery: {act_on: [leaks]}}", "'runtime.recovery.act_on': input should be 'timeout', 'leak' or"),
        (
            "runtime: {recovery: {act_on: [leak], enabled: false}}",
            "in 'runtime': option 'recovery.act_on' needs 'recovery.enabled': turn that on, or remove 'act_on'",
        ),
        ("runtime: {recovery: {dry_run: true}}", "'recovery.dry_run' needs 'recovery.act_on': name anomalies there"),
        (
            "runtime: {recovery: {act_on: [leak]}}, monitoring: {anomaly: {enabled: false}}",
            "'runtime.recovery.act_on' needs 'monitoring.anomaly.enabled', which finds anomalies: turn that on, or",
        ),
        (
            "monitoring: {forecast: {enabled: true, history_path: a}}",
            "'monitoring.forecast.history_path': must be absolu",
        ),
        ("monitoring: {forecast: {history_path: /a}}", "'history_path' needs 'enabled': turn that on, or remove the"),
        ("monitoring: {journal: {path: faults.jsonl}}", "'monitoring.journal.path': must be absolute, such as '/var"),
        ("monitoring: {journal: {max_bytes: 1KB}}", "'monitoring.journal.max_bytes': .*nearest valid value is 65536"),
        (
            "monitoring: {enabled: false, journal: {path: /f}}",
            "'journal.path' needs 'enabled': turn that on, or remove",
        ),
        ("monitoring: {forecast: {horizon_seconds: 6}}", "'horizon_seconds' must not be below 'bin_seconds': 6 < 60"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        load_stage_config(deploy(tmp_path, f"omni_sched: {{{text}}}\n"), {})


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("batching: {}\npools: {}\nbatching: {}\n", "batching", "1 and 3"),
        ("batching:\n  hold_ms: 1\n  min_batch_size: 1\n  hold_ms: 2\n", "batching.hold_ms", "2 and 4"),
        ("batching:\n  stages:\n    1: {}\n    '1': {}\n", "batching.stages.1", "3 and 4"),
    ],
)
def test_what_is_there_twice_is_refused(tmp_path, text, key, lines):
    says = f"ours.yaml: option '{key}' is given twice, in lines {lines}: keep one"
    file = deploy(tmp_path, text, "ours.yaml")
    with pytest.raises(ConfigError, match=says):
        load_stage_config(None, {VARIABLE: str(file)})
    with pytest.raises(ConfigError, match=says):
        load_stage_config(deploy(tmp_path, "omni_sched: ours.yaml\n"), {})


def test_in_the_deploy_yaml_only_what_is_ours_is_refused(tmp_path):
    theirs = deploy(tmp_path, "stages: []\nstages: [{a: 1, a: 2}]\nomni_sched: {}\n")
    assert load_stage_config(theirs, {}) == StageSchedConfig()
    with pytest.raises(ConfigError, match=r"deploy.yaml: option 'omni_sched.pools' is given twice, in lines 1 and 1"):
        load_stage_config(deploy(tmp_path, "omni_sched: {pools: {}, pools: {}}\n"), {})
    with pytest.raises(ConfigError, match=r"deploy.yaml: option 'omni_sched' is given twice"):
        load_stage_config(deploy(tmp_path, "omni_sched: {}\nomni_sched: {}\n"), {})


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=f"{VARIABLE} names the file 'no.yaml', which cannot be read: No such file"):
        load_stage_config(None, {VARIABLE: "no.yaml"})
    with pytest.raises(ConfigError, match=r"deploy.yaml: 'omni_sched' names the file '.*no.yaml', which cannot"):
        load_stage_config(deploy(tmp_path, "omni_sched: no.yaml\n"), {})
    with pytest.raises(ConfigError, match=r"the deploy YAML names the file .*, which cannot be read"):
        load_stage_config(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match="must be a mapping of options or the path of a YAML file, got int"):
        load_stage_config(deploy(tmp_path, "omni_sched: 3\n"), {})
    both = {VARIABLE: str(EXAMPLE)}
    with pytest.raises(ConfigError, match=f"both .*'omni_sched' and {VARIABLE}=.* give options .*: remove one"):
        load_stage_config(deploy(tmp_path, "omni_sched: {}\n"), both)


NESTED = "omni_sched: " + "{a: " * 1000 + "1" + "}" * 1000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NESTED, "nested"),
        ("batching:\n" + "".join(" " * i + "- \n" for i in range(1, 200)), "nested"),
        (BOMB, "aliases"),
        ("batching: &self {stages: *self}\n", "contains itself"),
        ("# " + "x" * (1 << 20) + "\n", "characters"),
    ],
    ids=["flow", "block", "bomb", "circle", "long"],
)
def test_a_file_that_no_options_need_is_refused_by_its_name(tmp_path, text, why):
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"ours.yaml: .*{why}"):
        load_stage_config(None, {VARIABLE: str(file)})
    with pytest.raises(ConfigError, match=f"ours.yaml: .*{why}"):
        load_config({"omni_sched": str(file)})


def test_the_last_resort_is_later_than_repairs():
    recovery = {"hang_seconds": 100.0, "max_wait_seconds": 5000.0}
    assert read_stage_options({}, "here").runtime.stalls_after_seconds == 1800
    assert read_stage_options({"runtime": {"recovery": recovery}}, "here").runtime.stalls_after_seconds == 10_000
    assert read_stage_options({"runtime": {"stall_seconds": None}}, "here").runtime.stalls_after_seconds is None
    with pytest.raises(ConfigError, match=r"'stall_seconds' must be above 'recovery\.max_wait_seconds'"):
        read_stage_options({"runtime": {"stall_seconds": 600, "recovery": recovery}}, "here")
