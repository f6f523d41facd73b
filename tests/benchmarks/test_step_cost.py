"""The step benchmark: its scenarios on the installed vLLM, and the run with workers that are not real."""

import pytest

from benchmarks.harness.child import ChildFailed
from benchmarks.step_cost import plot, report
from benchmarks.step_cost.__main__ import SCENARIOS as OFFERED
from benchmarks.step_cost.__main__ import parse
from benchmarks.step_cost.measure import Cell, measure
from benchmarks.step_cost.variants import Variant, choose

STOCK, OURS = Variant("0.32.0", "stock"), Variant("0.32.0", "ours")


class FakeWorker:
    """Answers as a worker does; every sample costs `seconds`. Fails when it is asked to prepare `fails_at`."""

    def __init__(self, seconds=0.001, message=None, fails_at=None, log=None):
        self.seconds, self.message, self.fails_at, self.log = seconds, message, fails_at, log
        self.asked = []

    def ask(self, **request):
        self.asked.append(request)
        if request["do"] == "prepare" and request["scenario"] == self.fails_at:
            raise ChildFailed("it ended\nKeyError: 'x'")
        if request["do"] == "message":
            return {"bytes": self.message}
        if request["do"] == "sample" and self.log is not None:
            self.log.append(self)
        return {"samples": [self.seconds] * request.get("count", 0)}


def run(workers, plan, **options):
    told = []
    settings = {"rounds": 3, "cell_seconds": 1.0, "seed": 0, "progress": lambda what, size: told.append(what)}
    rows = measure(workers, plan, **settings | options)
    return [cell for row in rows for cell in row], told


def test_workers_take_turns():
    log = []
    stock, ours = FakeWorker(log=log), FakeWorker(log=log)
    cells, _ = run({STOCK: stock, OURS: ours}, [("decode", 64, 10)], rounds=4)
    assert [{*log[i : i + 2]} for i in range(0, 8, 2)] == [{stock, ours}] * 4
    assert [(cell.variant, len(cell.samples), len(cell.rounds)) for cell in cells] == [(STOCK, 40, 4), (OURS, 40, 4)]


def test_an_expensive_cell_leaves_after_two_rounds():
    dear, cheap = FakeWorker(seconds=2.0), FakeWorker()
    cells, _ = run({STOCK: dear, OURS: cheap}, [("one_shot_prefill", 64, 1)], rounds=5)
    assert [len(cell.rounds) for cell in cells] == [2, 5]


def test_the_message_becomes_a_cell_of_its_own():
    cells, _ = run({OURS: FakeWorker(message=2000)}, [("realtime_frame", 64, 1)])
    assert [(cell.scenario, cell.summary.median) for cell in cells] == [
        ("realtime_frame", 0.001),
        ("message_bytes", 2000),
    ]
    assert cells[1].as_record()["unit"] == "bytes"


def test_a_worker_that_fails_is_left_out_from_there():
    plan = [("decode", 64, 1), ("abort", 64, 1), ("one_chunk", 64, 1)]
    cells, told = run({STOCK: FakeWorker(fails_at="abort"), OURS: FakeWorker()}, plan)
    assert [(cell.variant, cell.scenario) for cell in cells] == [
        (STOCK, "decode"),
        (OURS, "decode"),
        (OURS, "abort"),
        (OURS, "one_chunk"),
    ]
    assert "left out from here: stock:0.32.0: KeyError: 'x'" in told


def cell(variant, size, seconds, scenario="realtime_frame"):
    return Cell(variant, scenario, size, rounds=[seconds] * 3, samples=[seconds] * 3)


CELLS = [
    *(cell(STOCK, n, n * 2.6e-6) for n in (1024, 32768)),
    *(cell(OURS, n, 0.12e-3) for n in (1024, 32768)),
    cell(STOCK, 64, 1.00e-3, "text_decode"),
    cell(OURS, 64, 1.05e-3, "text_decode"),
]


def test_bars_are_met_or_missed():
    rows = list(zip(*(column.cells for column in report.bars_table(CELLS).columns), strict=True))
    assert ("realtime_frame", "≤ 0.15 ms at 32,768", "0.32.0", "0.12", "met") in rows
    assert ("text_decode", "≤ 1.02 of stock", "0.32.0", "1.05", "[bold red]missed[/]") in rows
    assert len(rows) == 3  # only what was measured


def test_the_ratio_is_taken_round_by_round():
    stock = Cell(STOCK, "decode", 64, rounds=[1.0, 2.0, 4.0], samples=[1.0])
    ours = Cell(OURS, "decode", 64, rounds=[1.1, 2.2, 9.9], samples=[1.0])
    assert report.ratio_to_stock([stock, ours], OURS, 64) == pytest.approx(1.1)
    assert report.ratio_to_stock([ours], OURS, 64) is None


def test_tables_and_picture(tmp_path):
    first = next(iter(report.tables(CELLS)))
    assert list(first.columns[2].cells) == ["2.66", "0.12"]
    assert list(first.columns[4].cells) == ["1.00", "0.00"]
    assert plot.draw(tmp_path / "x.png", CELLS).read_bytes().startswith(b"\x89PNG")
    assert plot.draw(tmp_path / "y.png", CELLS[-2:]) is None


def test_variants_are_ordered_by_version_and_stock_comes_first():
    chosen = choose(["0.33.0", "0.4.0"], ["ours", "stock", "patched"], ["v1"])
    assert [str(v) for v in chosen] == ["stock:0.4.0", "ours:0.4.0", "stock:0.33.0", "patched:0.33.0", "ours:0.33.0"]


def test_both_runners_are_measured_where_they_differ():
    chosen = choose(["0.32.0", "0.33.0"], ["ours", "stock"])
    assert [str(v) for v in chosen] == [
        "stock:0.32.0", "ours:0.32.0", "stock:0.33.0", "ours:0.33.0", "stock:0.33.0:v2", "ours:0.33.0:v2"
    ]  # fmt: skip
    assert [v.label for v in chosen[1:4:2]] == ["ours", "ours, runner V1"]
    assert [str(v) for v in choose(["0.32.0"], ["ours"], ["v2"])] == ["ours:0.32.0:v2"]
    assert Cell(chosen[-1], "decode", 64, [1.0], [1.0]).as_record()["runner"] == "V2"


def test_a_runner_is_compared_with_stock_for_the_same_runner():
    v1, v2 = (Variant("0.33.0", "ours", runner) for runner in ("v1", "v2"))
    cells = [cell(v, 64, seconds, "decode") for v, seconds in ((v1.stock(), 1), (v1, 2), (v2.stock(), 3), (v2, 3))]
    assert [report.ratio_to_stock(cells, variant, 64) for variant in (v1, v2)] == [2, 1]


@pytest.mark.parametrize("arguments", [["--scenarios", "decoding"], ["--kinds", "theirs"], ["--runners", "v3"]])
def test_unknown_names_are_refused_with_those_there_are(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert f"unknown {arguments[0][2:-1]} '{arguments[1]}'; there are " in capsys.readouterr().err


def test_every_scenario_is_offered():
    pytest.importorskip("vllm")
    from benchmarks.step_cost.scenarios import SCENARIOS

    assert list(SCENARIOS) == list(OFFERED)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("runner_v2", [False, True], ids=["v1", "v2"])
def test_a_scenario_runs(name, kind, runner_v2):
    pytest.importorskip("vllm")
    import vllm_omni_sched
    from benchmarks.step_cost.scenarios import SCENARIOS

    scenario = SCENARIOS[name](None if kind == "stock" else vllm_omni_sched.OmniScheduler, 8, runner_v2=runner_v2)
    assert (type(scenario.scheduler).__module__.partition(".")[0] == "vllm") is (kind == "stock")
    assert scenario.scheduler.use_v2_model_runner is runner_v2
    before = scenario.timed.seconds
    assert scenario.sample() > 0
    assert scenario.sample() > 0
    assert scenario.timed.seconds > before
    scenario.close()
    assert not scenario.scheduler.requests


def test_our_message_does_not_grow_with_the_session_and_vllms_does():
    pytest.importorskip("vllm")
    import vllm_omni_sched
    from benchmarks.step_cost.scenarios import RealtimeFrame

    def growth(scheduler_cls):
        sizes = []
        for held in (8, 512):
            scenario = RealtimeFrame(scheduler_cls, held)
            sizes.append(scenario.message_bytes())
            scenario.close()
        return sizes[1] - sizes[0]

    assert growth(None) > 10_000
    assert abs(growth(vllm_omni_sched.OmniScheduler)) < 64


def test_a_profile_sees_the_timed_sections_only():
    pytest.importorskip("vllm")
    from benchmarks.step_cost.scenarios import Decode
    from benchmarks.step_cost.worker import profile

    names = [name for _, _, name in profile(Decode(None, 8), count=2, top=1000)]
    assert any(name.startswith("schedule (") for name in names)
    assert not any(name.startswith("make_runner_output (") for name in names)


def test_hollow_packages_stand_in_for_missing_ones(monkeypatch):
    import importlib
    import sys

    from benchmarks.step_cost.tree import _HollowFinder

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, _HollowFinder(["no_such_package"])])
    try:
        assert isinstance(importlib.import_module("no_such_package.deep.down").AnyName, type)
    finally:
        for name in [name for name in sys.modules if name.startswith("no_such_package")]:
            del sys.modules[name]
