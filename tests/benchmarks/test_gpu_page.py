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
from benchmarks.gpu.parts import Ended, Machine, Outcome, Part, parts
from benchmarks.gpu.verdicts import Advice, of_ipc, of_lanes

ALL = Machine("a GPU", 80 << 30, frozenset({"PyNvVideoCodec", "av", "vllm"}), 64 << 30)


def lane(variant: str, itl: float, images: float) -> dict[str, Any]:
    return {"variant": variant, "itl_p99_of_alone": itl, "images_of_alone": images}


@pytest.mark.parametrize("part", parts(ALL)[:5], ids=lambda part: part.name)
def test_each_part_takes_its_arguments(part: Part, tmp_path: Path):
    import importlib

    options = importlib.import_module(f"{part.module}.__main__").parse([*part.arguments, "--out", str(tmp_path)])
    assert options.out == tmp_path


def part(code: str, seconds: float = 60.0, lacks: str = "") -> Part:
    return Part("try", "does it run?", "tests.benchmarks.gpu_part", (code,), seconds, "gpu-try", lacks)


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


def clip(engines: int, cpu: float | None = None, one: float | None = None) -> dict[str, Any]:
    ratios = {"latency_of_cpu": cpu, "latency_of_one": one}
    row = {"clip": "h264", "task": "32 frames", "decoder": "nvdec", "decoders": engines, "seconds": {"median": 1.0}}
    return row | {name: ratio for name, ratio in ratios.items() if ratio is not None}


def frames(*ratios: float, wrong: int = 0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"clip": "av1", "frames": 32, "refused": "device_refused"}]
    return rows + [{"clip": "h264", "frames": n, "host_of_stay": r, "wrong": wrong} for n, r in enumerate(ratios)]


def tier(restore: float, device_seconds: float = 1.0, wrong: int = 0) -> list[dict[str, Any]]:
    return [
        {"task": "host tier", "embeds": 1000, "restore_seconds": {"median": restore}, "wrong": wrong},
        {"task": "encode", "embeds": 500, "encode_seconds": {"median": 1.0}},
        {"task": "stitch", "host_seconds": {"median": 2.0}, "device_seconds": {"median": device_seconds}, "wrong": 0},
    ]


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


def test_no_part_but_vllm_needs_vllm():
    parts = [f"benchmarks.gpu.{part}.{name}" for part in ("copies", "frames") for name in ("measure", "__main__")]
    words = f"import sys; sys.modules['vllm'] = None; import benchmarks.gpu.__main__, {', '.join(parts)}"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stderr == ""
