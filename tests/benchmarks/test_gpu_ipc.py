"""The benchmark of CUDA IPC without a GPU: arguments, what is made of the samples, both sides on the host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.gpu import ipc
from benchmarks.gpu.ipc import THEIRS, VARIANTS
from benchmarks.gpu.ipc import __main__ as program
from benchmarks.gpu.ipc.peer import is_right, pattern
from benchmarks.gpu.ipc.report import Found, Round, a_round, complaints, record, table

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


def test_a_round_is_from_put_to_got() -> None:
    sent = {"begun": [1.0, 2.0, 3.0], "put": [0.1, 0.2, 0.3], "on_device": 2}
    made = a_round(sent, {"got": [1.5, 2.5, 5.0], "get": [0.1, 0.1, 0.4], "wrong": 1})
    assert made.seconds["end to end"] == pytest.approx(0.5)
    assert made.seconds["put"] == pytest.approx(0.2)
    assert (made.wrong, made.messages, made.on_device) == (1, 3, 2)


def test_ratios_are_taken_round_by_round_and_rows_can_be_written() -> None:
    rows = json.loads(json.dumps(record(found(refused={("1 GB", "arena"): "no room"}), SIZES)))
    whole = next(row for row in rows if (row.get("measure"), row["variant"]) == ("end to end", "cuda_ipc"))
    assert whole["median"] == pytest.approx(1e-3)
    assert whole["theirs_over_it"] == 4.0
    assert whole["gigabytes_per_second"] == pytest.approx((1 << 20) / 1e-3 / 1e9, abs=1e-3)
    assert (whole["wrong"], whole["through_host"]) == (0, 0)
    assert {"size": "1 GB", "variant": "arena", "refused": "no room"} in rows
    assert {"variant": "cuda_ipc", "measure": "order", "messages": 10, "early": 9, "wrong": 0} in rows


def test_the_table_has_a_line_per_cell_and_says_what_was_refused() -> None:
    rows = record(found(refused={("1 GB", "arena"): "no room"}), SIZES)
    shown = table(rows, "some GPU")
    assert list(shown.columns[1].cells) == ["cuda_ipc", THEIRS, "cuda_ipc", "arena"]
    assert list(shown.columns[2].cells)[2:] == ["9 of 10 put before the kernel had ended, 0 wrong", "no room"]
    assert list(shown.columns[7].cells)[:2] == ["4", ""]


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


def test_what_a_message_holds_is_told_from_any_other() -> None:
    assert is_right(pattern(400, 3, "cpu"), 400, 3)
    assert not is_right(pattern(400, 4, "cpu"), 400, 3)
    broken = pattern(400, 3, "cpu")
    broken[99] += 1
    assert not is_right(broken, 400, 3)


def test_arguments_have_defaults_and_lists() -> None:
    assert program.parse([]).variants == list(VARIANTS)
    options = program.parse(["--sizes", "64 KB, 1 GB", "--variants", "arena; cuda_ipc, views"])
    assert (options.sizes, options.variants) == (["64 KB", "1 GB"], ["arena", "cuda_ipc, views"])


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
