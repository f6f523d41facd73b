"""What `benchmarks.handover` makes of its stamps and rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.handover import THEIRS, VARIANTS
from benchmarks.handover.__main__ import answers, record, table
from benchmarks.handover.serve import times_of
from benchmarks.handover.stamps import GET, PUT, WRITE_EVERY, YIELD, Stamps, read


def test_stamps_of_two_processes_become_messages(tmp_path: Path) -> None:
    sender, receiver = Stamps(tmp_path), Stamps(tmp_path)
    for number in range(WRITE_EVERY):
        receiver.looked("0->1", "a_0_0", 1.0 + number, 1.25 + number)
    sender.write(PUT, "0->1", "a_0_0", 2.0, 5.0)
    sender.write(PUT, "0->1", "never got", 2.0, 5.0)
    receiver.write(YIELD, "0->1", "a_0_0", 8.0, 8.5)
    receiver.write(GET, "0->1", "a_0_0", 7.0, 8.0)
    (message,), looks, seconds = read(tmp_path)
    assert (looks, seconds) == (WRITE_EVERY, WRITE_EVERY / 4)
    seconds_of = {"hand-over": 6.0, "put": 3.0, "turn": 2.0, "get": 1.0, "put to got": 6.0, "floor": 0.5}
    assert times_of(message) == {"first": True, "edge": "0->1", **seconds_of}


def test_a_message_is_handed_over_from_when_it_is_wanted(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path)
    stamps.write(PUT, "0->1", "a_0_1", 2.0, 3.0)
    stamps.looked("0->1", "a_0_1", 5.0, 5.5)
    stamps.write(GET, "0->1", "a_0_1", 6.0, 7.0)
    times = times_of(read(tmp_path)[0][0])
    assert (times["hand-over"], times["turn"], times["put to got"], times["first"]) == (2.0, 1.0, 5.0, False)
    assert times["floor"] is None


def rounds(scale: float, said: int = 1) -> list[dict[str, Any]]:
    parts = {"hand-over": 4.0, "put": 2.0, "turn": 1.0, "get": 1.0, "put to got": 8.0, "floor": 1.0}
    messages = [{"first": True, **{part: value * scale for part, value in parts.items()}}]
    return [{"messages": messages, "answers": {"0": {"text": {"0": [said]}}}}] * 2


def test_a_record_has_the_ratio_of_theirs_to_it() -> None:
    found = record("full_payload", {name: rounds(2.0 if name == THEIRS else 0.5) for name in VARIANTS})
    ratios = {(e["variant"], e["part"]): e.get("theirs_over_it") for e in found}
    assert ratios["ArenaConnector", "hand-over"] == 4.0
    assert ratios[THEIRS, "hand-over"] is None
    assert ratios["ArenaConnector", "floor"] is None
    assert {e["messages"] for e in found} == {"first"}, "there were no others"
    assert table("full_payload", found).row_count == 12


def test_answers_that_differ_are_counted_and_many_end_the_benchmark() -> None:
    same = {name: rounds(1.0) for name in VARIANTS}
    assert [entry["that_differ"] for entry in answers("full_payload", same)] == [0, 0, 0]
    many = {str(number): "as always" for number in range(200)}
    few = same | {name: [{"answers": many}] * 2 for name in VARIANTS}
    few["ArenaConnector"] = [{"answers": many | {"7": "something else"}}, {"answers": many}]
    assert [entry["that_differ"] for entry in answers("full_payload", few)] == [0, 1, 0]
    with pytest.raises(SystemExit, match="ArenaConnector"):
        answers("full_payload", same | {"ArenaConnector": rounds(1.0, said=2)})
