"""The benchmark of CUDA IPC without a GPU: arguments, what is made of the samples, both sides on the host."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import ipc
from benchmarks.gpu.ipc import THEIRS
from benchmarks.gpu.ipc import __main__ as program
from benchmarks.gpu.ipc.report import Found, Round, complaints, record

SIZES = {"1 MB": 1 << 20}


def one_round(seconds: float, wrong: int = 0, on_device: int = 10) -> Round:
    return Round(
        {"end to end": seconds, "P99": 2 * seconds, "put": seconds / 2, "get": seconds / 4}, wrong, 10, on_device
    )


def found(**more: Any) -> Found:
    return Found(
        {
            ("1 MB", "cuda_ipc"): [one_round(1e-3), one_round(2e-3), one_round(1e-3)],
            ("1 MB", THEIRS): [
                one_round(4e-3, on_device=0),
                one_round(20e-3, on_device=0),
                one_round(4e-3, on_device=0),
            ],
        },
        {"cuda_ipc": {"messages": 10, "early": 9, "wrong": 0}},
        **more,
    )


def test_wrong_content_and_detours_are_complained_about() -> None:
    assert complaints(record(found(), SIZES)) == []
    bad = found()
    bad.rounds["1 MB", "cuda_ipc"][1] = one_round(1e-3, wrong=2, on_device=7)
    bad.order["cuda_ipc"]["wrong"] = 1
    assert complaints(record(bad, SIZES)) == [
        "cuda_ipc, 1 MB: 2 wrong",
        "cuda_ipc, order: 1 wrong",
        "cuda_ipc, 1 MB: 3 went through the host",
    ]


def test_both_sides_work_on_the_host_where_nothing_stays_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ipc.MESSAGES, "64 KB", 3)
    monkeypatch.setattr(program, "ORDER_MESSAGES", 1)
    monkeypatch.setattr(program, "ORDER_BYTES", 1 << 16)
    options = program.parse(["--sizes", "64 KB", "--rounds", "1", "--variants", "arena;cuda_ipc"])
    rows = record(program.measure(options, "cpu"), ipc.SIZES)
    assert [row for row in rows if "refused" in row] == []
    assert {(row["variant"], row["samples"]) for row in rows if row["measure"] == "put"} == {
        ("arena", 1),
        ("cuda_ipc", 1),
    }
    assert {row["wrong"] for row in rows if "wrong" in row} == {0}
    assert complaints(rows) == ["cuda_ipc, 64 KB: 3 went through the host"]
