"""`python -m benchmarks.gpu` without a GPU: its parts, what figures say about defaults, bounds on time, the page."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import device, runner
from benchmarks.gpu.copies import __main__ as copies
from benchmarks.gpu.page import picture
from benchmarks.gpu.parts import Ended, Machine, Outcome, Part, parts
from benchmarks.gpu.verdicts import Advice, Finding, findings, of_copies, of_frames, of_ipc, of_lanes, of_nvdec, of_vllm

ALL = Machine("a GPU", 80 << 30, frozenset({"PyNvVideoCodec", "av", "vllm"}), 64 << 30)


def lane(variant: str, itl: float, images: float) -> dict[str, Any]:
    return {"variant": variant, "itl_p99_of_alone": itl, "images_of_alone": images}


def advised(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.option, one.then, one.advice.value) for one in found]


# -- parts -----------------------------------------------------------------


def test_all_parts_fit_into_their_minutes():
    for minutes in (2.0, 10.0):
        assert sum(part.seconds for part in parts(ALL, minutes)) <= 60 * minutes
    assert [part.name for part in parts(ALL)] == ["lanes", "ipc", "nvdec", "frames", "copies", "vllm"]


def test_a_part_says_what_it_lacks_here():
    lacking = {part.name: part.lacks for part in parts(Machine("small", 4 << 30)) if part.lacks}
    assert lacking == {
        "lanes": "it needs 8 GiB of GPU memory",
        "nvdec": "PyNvVideoCodec is not installed",
        "frames": "PyNvVideoCodec is not installed",
        "vllm": "vLLM is not installed",
    }
    assert not any(part.lacks for part in parts(ALL))
    without_pyav = parts(Machine("a GPU", 80 << 30, frozenset({"PyNvVideoCodec", "vllm"})))
    assert {part.name: part.lacks for part in without_pyav if part.lacks} == {"frames": "av is not installed"}


def test_parts_shrink_with_the_machine():
    lanes, ipc, *_ = parts(Machine("medium", 16 << 30))
    assert lanes.arguments[lanes.arguments.index("--layers") + 1] == "8"
    assert "256 MB" not in " ".join(ipc.arguments)


@pytest.mark.parametrize("part", parts(ALL)[:5], ids=lambda part: part.name)
def test_each_part_takes_its_arguments(part: Part, tmp_path: Path):
    import importlib

    options = importlib.import_module(f"{part.module}.__main__").parse([*part.arguments, "--out", str(tmp_path)])
    assert options.out == tmp_path


# -- processes -------------------------------------------------------------


def part(code: str, seconds: float = 60.0, lacks: str = "") -> Part:
    return Part("try", "does it run?", "tests.benchmarks.gpu_part", (code,), seconds, "gpu-try", lacks)


def test_a_part_leaves_its_results(tmp_path: Path):
    ended = runner.run(part("results"), tmp_path)
    assert (ended.outcome, ended.rows) == (Outcome.DONE, [{"a": 1}])


def test_a_part_that_complains_has_its_results_and_the_complaint(tmp_path: Path):
    ended = runner.run(part("complains"), tmp_path)
    assert (ended.outcome, ended.reason, ended.rows) == (Outcome.WRONG, "1 tensor was wrong", [{"a": 1}])


def test_a_part_without_results_gives_its_last_line(tmp_path: Path):
    ended = runner.run(part("fails"), tmp_path)
    assert (ended.outcome, ended.reason, ended.rows) == (Outcome.FAILED, "no memory", [])


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 1.0)
    ended = runner.run(part("hangs", seconds=2.0), tmp_path)
    assert (ended.outcome, ended.reason, ended.rows) == (Outcome.OUT_OF_TIME, "it was ended after 2 s", [{"a": 1}])
    try:
        child = os.pidfd_open(int((tmp_path / "child").read_text()))
    except ProcessLookupError:
        return
    assert select.select([child], [], [], 20.0)[0], "a child of the part goes on"
    os.close(child)


def test_a_part_that_lacks_something_is_not_started(tmp_path: Path):
    ended = runner.run(part("results", lacks="no engine"), tmp_path)
    assert (ended.outcome, ended.reason) == (Outcome.SKIPPED, "no engine")
    assert not list(tmp_path.iterdir())


# -- what figures say ------------------------------------------------------


def test_a_good_lane_turns_encode_ahead_on():
    rows = [lane("side stream", 1.4, 0.9), lane("lane, share 1", 1.1, 0.7), lane("lane, 32 SMs", 1.05, 0.65)]
    assert advised(of_lanes(rows)) == [
        ("encode_ahead on one GPU", "true", "change"),
        ("expert.encode_lane_sms", "all", "keep"),
    ]


def test_a_part_of_the_multiprocessors_is_the_default_if_only_that_is_good():
    rows = [lane("lane, share 1", 1.3, 0.9), lane("lane, 32 SMs", 1.1, 0.7), lane("lane, 16 SMs", 1.02, 0.61)]
    assert advised(of_lanes(rows))[1] == ("expert.encode_lane_sms", "32", "change")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([lane("lane, share 1", 1.3, 0.9), lane("lane, share 1, decode prior", 1.1, 0.8)], "higher priority"),
        ([lane("lane, share 1", 1.3, 0.9), lane("lane, share 0.5", 1.2, 0.7)], "the nearest: lane, share 0.5"),
        ([lane("lane, share 1", 1.1, 0.5)], "no lane meets the aim"),
    ],
)
def test_otherwise_encode_ahead_stays_off(rows: list[dict[str, Any]], why: str):
    (found,) = of_lanes(rows)
    assert found.advice is Advice.KEEP
    assert why in found.why


def message(size: str, variant: str, median: float, wrong: int = 0) -> dict[str, Any]:
    return {"size": size, "variant": variant, "measure": "end to end", "median": median, "wrong": wrong}


@pytest.mark.parametrize(
    ("ipc", "least", "advice"),
    [
        ((1.0, 1.0, 1.0), "1 MB", Advice.CHANGE),
        ((3.0, 1.0, 1.0), "4 MB", Advice.KEEP),
        ((1.0, 3.0, 1.0), "16 MB", Advice.CHANGE),
        ((3.0, 3.0, 3.0), "above 16 MB", Advice.CHANGE),
    ],
)
def test_min_bytes_is_where_ipc_is_always_quicker(ipc: tuple[float, ...], least: str, advice: Advice):
    sizes = ("1 MB", "4 MB", "16 MB")
    rows = [message(size, "cuda_ipc", time) for size, time in zip(sizes, ipc, strict=True)]
    rows += [message(size, "arena", 2.0) for size in sizes]
    (found,) = of_ipc(rows)
    assert (found.then, found.advice) == (least, advice)


@pytest.mark.parametrize(
    ("itl", "image", "advice"), [(0.2, 1.0, Advice.CHANGE), (0.2, 1.8, Advice.KEEP), (0.95, 0.9, Advice.KEEP)]
)
def test_a_whole_engine_must_gain_for_tokens_and_not_lose_for_images(itl: float, image: float, advice: Advice):
    rows = [
        {"variant": "ours", "load": 4.0, "measure": "ITL beside images P99, all rounds together", "ratio": itl},
        {"variant": "ours", "load": 4.0, "measure": "image TTFT P50, all rounds together", "ratio": image},
    ]
    (found,) = of_vllm(rows)
    assert found.advice is advice
    assert of_vllm(rows[:1]) == []


def test_a_wrong_tensor_forbids_ipc():
    (found,) = of_ipc([message("1 MB", "cuda_ipc, views", 1.0, wrong=2), message("1 MB", "arena", 1.0, wrong=1)])
    assert (found.advice, found.why) == (Advice.FIX, "2 tensors were wrong")


def clip(engines: int, cpu: float | None = None, one: float | None = None) -> dict[str, Any]:
    ratios = {"latency_of_cpu": cpu, "latency_of_one": one}
    row = {"clip": "h264", "task": "32 frames", "decoder": "nvdec", "decoders": engines, "seconds": {"median": 1.0}}
    return row | {name: ratio for name, ratio in ratios.items() if ratio is not None}


def test_nvdec_is_on_where_it_is_quicker_and_by_all_engines_where_these_help():
    assert advised(of_nvdec([clip(1, 1.5), clip(2, 2.5, 1.7)])) == [
        ("video.nvdec", "auto", "change"),
        ("video.nvdec_engines", "auto", "keep"),
    ]
    assert advised(of_nvdec([clip(1, 0.5), clip(2, 0.6, 1.1)])) == [
        ("video.nvdec", "off", "keep"),
        ("video.nvdec_engines", "1", "change"),
    ]


def test_a_frame_that_differs_forbids_nvdec():
    (found,) = of_nvdec([clip(1, 9.0), {"clip": "h264", "task": "all", "compared": 9, "wrong": 1}])
    assert found.advice is Advice.FIX


def frames(*ratios: float, wrong: int = 0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"clip": "av1", "frames": 32, "refused": "device_refused"}]
    return rows + [{"clip": "h264", "frames": n, "host_of_stay": r, "wrong": wrong} for n, r in enumerate(ratios)]


def test_frames_stay_on_the_gpu_where_that_is_always_quicker():
    assert advised(of_frames(frames(1.2, 2.0))) == [("video.device_bytes", "0; recommend it with nvdec", "change")]
    assert advised(of_frames(frames(2.0, 1.1))) == [("video.device_bytes", "0", "keep")]
    assert of_frames(frames(2.0, 1.1))[0].why.endswith("1.1 times as long for 1 frames, h264, the least")
    assert advised(of_frames(frames(2.0, wrong=1))) == [("video.device_bytes", "0", "fix")]
    assert of_frames(frames()) == []


def tier(restore: float, device_seconds: float = 1.0, wrong: int = 0) -> list[dict[str, Any]]:
    return [
        {"task": "host tier", "embeds": 1000, "restore_seconds": {"median": restore}, "wrong": wrong},
        {"task": "encode", "embeds": 500, "encode_seconds": {"median": 1.0}},
        {"task": "stitch", "host_seconds": {"median": 2.0}, "device_seconds": {"median": device_seconds}, "wrong": 0},
    ]


def test_the_host_tier_pays_where_a_restore_is_quicker_than_an_encode():
    assert [one.advice for one in of_copies(tier(1.0))] == [Advice.CHANGE, Advice.CHANGE]
    assert [one.advice for one in of_copies(tier(1.9, 1.9))] == [Advice.KEEP, Advice.KEEP]
    assert [one.advice for one in of_copies(tier(1.0, wrong=1))] == [Advice.FIX]


def test_parts_without_figures_say_nothing():
    assert findings({"lanes": [], "ipc": [{"size": "1 MB", "variant": "arena", "refused": "no room"}]}) == []
    assert of_lanes([{"variant": "lane, 16 SMs", "refused": "no green contexts"}]) == []


# -- the whole -------------------------------------------------------------


def test_copies_are_right_on_the_processor():
    rows = copies.measure(copies.parse(["--embeds", "8", "--frames", "4", "--rounds", "2", "--no-encode"]), "cpu")
    assert [row["task"] for row in rows] == ["host tier", "stitch"]
    assert copies.complaints(rows) == []
    assert list(copies.table(rows, "no GPU").columns[2].cells) == ["keep", "restore", "device", "host"]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))


def test_one_command_writes_figures_findings_and_a_page(a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = {"lanes": [lane("lane, share 1", 1.1, 0.7)], "ipc": [], "copies": []}
    for size in ("1 MB", "64 KB"):
        figures["ipc"] += [message(size, "cuda_ipc", 1e-4), message(size, "arena", 2e-4)]
    for row in tier(1.0):
        figures["copies"].append({**row, "keep_seconds": {"median": 1.0}})

    def run(part: Part, folder: Path) -> Ended:
        if part.name in figures:
            return Ended(part, Outcome.DONE, 1.0, "", figures[part.name])
        return Ended(part, Outcome.SKIPPED, reason="it is not here")

    monkeypatch.setattr(program, "run", run)
    program.main(["--out", str(tmp_path)])
    told = json.loads((tmp_path / "gpu-some-gpu.json").read_text())
    assert told["provenance"]["gpu"]["name"] == "Some GPU"
    done = [one["part"] for one in told["results"]["parts"] if one["outcome"] == "done"]
    assert done == ["lanes", "ipc", "copies"]
    assert [one["option"] for one in told["results"]["findings"]] == [
        "encode_ahead on one GPU",
        "expert.encode_lane_sms",
        "CudaIpcConnector min_bytes",
        "encoder_cache_host_bytes",
        "frames of several NVDEC engines",
    ]
    assert (tmp_path / "gpu-some-gpu.png").stat().st_size > 10_000


def test_it_ends_with_an_error_if_nothing_ran(a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "run", lambda part, _: Ended(part, Outcome.FAILED, reason="no driver"))
    with pytest.raises(SystemExit, match="no part has a result"):
        program.main(["--out", str(tmp_path), "--parts", "ipc"])


def test_the_page_needs_no_part(tmp_path: Path):
    assert picture(tmp_path / "page.png", [], [], "no GPU").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--minutes", "0"], "from 1 to 240 minutes"), (["--parts", "lanes,dance"], "unknown part 'dance'")],
)
def test_arguments_out_of_range_are_refused(capsys: Any, arguments: list[str], complaint: str):
    with pytest.raises(SystemExit):
        program.parse(arguments)
    assert complaint in capsys.readouterr().err


def test_no_part_but_vllm_needs_vllm():
    parts = [f"benchmarks.gpu.{part}.{name}" for part in ("copies", "frames") for name in ("measure", "__main__")]
    words = f"import sys; sys.modules['vllm'] = None; import benchmarks.gpu.__main__, {', '.join(parts)}"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stderr == ""
