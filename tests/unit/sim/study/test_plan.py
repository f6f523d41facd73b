"""Which points a file asks for, and what is said when they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios import GOOD
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.study.plan import Study, load_study
from vllm_omni_sched.sim.workloads.trace import Exact, Header, write_trace


def study(tmp_path: Path, more: str = "", before: str = "", **overrides: Any) -> Study:
    path = tmp_path / "one.toml"
    path.write_text(before + GOOD + more)
    return load_study(path, overrides)


VARIANTS = """
[[variants]]
name = "stock"
set = { "policy.encode_ahead" = false }
[[variants]]
name = "ours"
"""


def test_a_file_without_a_study_is_one_run(tmp_path: Path) -> None:
    found = study(tmp_path)
    assert found.single
    assert found.points[0].label == "seed 3"
    assert found.points[0].scenario() == found.base


def test_variants_times_values_times_seeds(tmp_path: Path) -> None:
    sweep = '[sweep]\n"workload.rate" = [1, 2.5]\n"stages.llm.replicas" = [2, 4]\n'
    found = study(tmp_path, VARIANTS + sweep, before="repeats = 2\n")
    assert not found.single
    assert len(found.points) == 2 * 2 * 2 * 2
    first, last = found.points[0], found.points[-1]
    assert first.label == "stock, workload.rate 1, stages.llm.replicas 2"
    assert [point.seed for point in found.points[:2]] == [3, 4]
    made = last.scenario()
    assert made.policy.encode_ahead is True
    assert (made.workload.rate, made.stage("llm").replicas, made.seed) == (2.5, 4, 4)
    assert first.scenario().policy.encode_ahead is False


def test_keys_without_quotes_are_the_same(tmp_path: Path) -> None:
    quoted = study(tmp_path, '[sweep]\n"workload.rate" = [1, 2]\n')
    bare = study(tmp_path, "[sweep]\nworkload.rate = [1, 2]\n")
    assert [point.overrides for point in bare.points] == [point.overrides for point in quoted.points]


def test_overrides_reach_all_points_and_the_study(tmp_path: Path) -> None:
    more = VARIANTS + '[search]\nkind = "max_rate"\n'
    found = study(tmp_path, more, **{"slo.ttft_seconds": 9.0, "search.precision": 0.2})
    assert {point.scenario().slo.ttft_seconds for point in found.points} == {9.0}
    assert found.search is not None
    assert found.search.precision == 0.2


CASES = """
[[variants]]
name = "tuned"
set = { "policy.encode_ahead" = false }
[variants.choices]
"stages.llm.max_num_seqs" = [8, 16]
order = [
  { "policy.waiting_order" = "sla", "policy.pieces" = true },
  { "policy.waiting_order" = "arrival", "policy.pieces" = true },
]
[[cases]]
name = "busy"
set = { "workload.rate" = 9.0 }
[cases.variants.tuned]
choices.layout = [
  { stages = [{ name = "llm", kind = "engine", model = "qwen2.5-vl-7b", replicas = 2, max_num_batched_tokens = 512 }] },
  { stages = [{ name = "llm", kind = "engine", model = "qwen2.5-vl-7b", replicas = 3, max_num_batched_tokens = 512 }] },
]
"""


def test_a_value_of_the_call_replaces_that_of_variants_cases_and_the_sweep(tmp_path: Path) -> None:
    sweep = '[sweep]\n"slo.ttft_seconds" = [1, 2]\n'
    given = {"workload.rate": 3.0, "policy.encode_ahead": True, "slo.ttft_seconds": 5.0, "seed": 9}
    (point,) = study(tmp_path, CASES + sweep, **given).points
    made = point.first_choice.scenario()
    assert (made.workload.rate, made.policy.encode_ahead, made.slo.ttft_seconds, made.seed) == (3.0, True, 5.0, 9)
    assert point.values == {"slo.ttft_seconds": 5.0}
    assert point.scenario({"workload.rate": 7.0}).workload.rate == 7.0  # what a search turns


def test_a_value_of_the_call_is_no_choice_any_more(tmp_path: Path) -> None:
    given = {"stages.llm.max_num_seqs": 4, "policy.waiting_order": "sla", "stages.llm.max_num_batched_tokens": 1024}
    (point,) = study(tmp_path, CASES, **given).points
    assert {name: len(values) for name, values in point.choices.items()} == {"layout": 2, "order": 1}
    for layout, replicas in zip(point.choices["layout"], (2, 3), strict=True):
        made = point.chosen({"layout": layout, "order": point.choices["order"][0]}, seed=1_000_000).scenario()
        llm = made.stage("llm")
        assert (llm.replicas, llm.max_num_seqs, llm.max_num_batched_tokens) == (replicas, 4, 1024)
        assert (made.policy.waiting_order.value, made.policy.pieces, made.seed) == ("sla", True, 1_000_000)


def test_a_study_with_nothing_left_to_choose_is_not_tuned(tmp_path: Path) -> None:
    given = {"stages.llm.replicas": 1, "stages.llm.max_num_seqs": 4, "policy.waiting_order": "sla"}
    (point,) = study(tmp_path, CASES, **given, **{"policy.pieces": False}).points
    assert list(point.choices) == ["layout"]
    (point,) = study(tmp_path, VARIANTS.replace("set =", "choices.a = [{ seed = 3 }]\nset ="), seed=4).points[:1]
    assert not point.choices


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[search]\nkind = 'max-rate'", "'search.kind' must be one of ['max_rate', 'tightest_slo', 'throughput']"),
        ("[search]\nkind = 'max_rate'\nprecison = 0.1", "'search.precison'; did you mean 'search.precision'?"),
        ("[search]\nkind = 'max_rate'\nkey = 'workload.tempo'", "'search.key' is 'workload.tempo', which has no value"),
        ("[sweep]\n'workload.rate' = []", "'sweep.workload.rate' has no values"),
        ("[sweep]\n'workload.rate' = 3", "'sweep.workload.rate': input should be a valid list, got 3"),
        ("[sweep]\n'workload.rate' = [1, -1]", "one.toml, workload.rate -1: option 'workload.rate': input should be"),
        ("[sweep]\n'stages.lm.replicas' = [1]", "there is no 'stages.lm'; did you mean 'stages.llm'?"),
        ("[[variants]]\nset = {}", "'variants.0.name' is missing"),
        ("[[variants]]\nname = 'a'\n[[variants]]\nname = 'a'", "'variants.a' is given twice"),
        ("[[variants]]\nname = 'a'\nset = { 'policy.ahead' = true }", "one.toml, a: unknown option 'policy.ahead'"),
        ("[variants]\nname = 'a'", "'variants' must be a list of tables, [[variants]]"),
    ],
)
def test_a_bad_study_is_told(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        study(tmp_path, more)
    assert said in str(caught.value)
    assert str(caught.value).startswith("one.toml")


def test_a_search_needs_a_value_to_start_from(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    text = GOOD.replace("servegen-mm-image", "trace").replace('rate = 4\nsla = "interactive"', "file = 'week.jsonl'")
    write_trace(tmp_path / "week.jsonl", Header("vllm-omni-sched trace", 1), [Exact(0.1, 9, 3, ())])
    path.write_text(text + "[search]\nkind = 'max_rate'\n")
    with pytest.raises(ConfigError, match=r"'workload\.rate', which has no value above 0: set it, or 'search\.start'"):
        load_study(path)
    assert load_study(path, {"search.start": 2.0}).search is not None
