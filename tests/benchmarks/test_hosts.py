"""Test what `benchmarks.hosts` makes of what it was told; the measuring itself takes namespaces and masters."""

import io
import random

import pytest
from rich.console import Console

from benchmarks.hosts import ENGINE, HIDDEN, PACKED, RAW, SIDES, STORE, __main__

WHAT = ("1 Gbit/s", HIDDEN, "1 MB")


class Peer:
    """Says how long a call took, and what it put or got."""

    def __init__(self, seconds, checksum=7):
        self.seconds, self.checksum, self.asked = seconds, checksum, []

    def ask(self, **request):
        self.asked.append(request)
        return {"seconds": self.seconds, "told": {"port": 1}, "checksum": self.checksum}


def sides(**seconds):
    took = {STORE: 4.0, ENGINE: 3.0, RAW: 2.0, PACKED: 1.0}
    return {side: (Peer(took[side]), Peer(1.0)) for side in SIDES}


def test_each_message_is_put_and_got_by_all_sides_and_told_about():
    found = sides()
    assert __main__.one_round(found, WHAT, 0, random.Random(0)) == {STORE: 5.0, ENGINE: 4.0, RAW: 3.0, PACKED: 2.0}
    for sender, receiver in found.values():
        keys = [one["key"] for one in sender.asked]
        assert keys == [one["key"] for one in receiver.asked]
        assert len(set(keys)) == __main__.MESSAGES["1 MB"] + __main__.WARM_UP
        assert all(one["told"] == {"port": 1} for one in receiver.asked)


def test_a_message_that_was_altered_ends_the_run():
    found = sides() | {RAW: (Peer(1.0), Peer(1.0, checksum=8))}
    with pytest.raises(SystemExit, match="OmniAutoConnector: what arrived is not what was sent"):
        __main__.one_round(found, WHAT, 0, random.Random(0))


def test_ratios_are_of_the_same_round():
    took = {STORE: [4.0, 8.0, 6.0], ENGINE: [3.0, 3.0, 3.0], RAW: [2.0, 2.0, 2.0], PACKED: [1.0, 1.0, 3.0]}
    records = __main__.record({(WHAT, side): seconds for side, seconds in took.items()})
    of = {one["variant"]: one for one in records}
    assert (of[RAW]["store_over_it"], of[RAW]["engine_over_it"]) == (3.0, 1.5)
    assert (of[PACKED]["store_over_it"], of[PACKED]["engine_over_it"]) == (4.0, 3.0)
    assert "store_over_it" not in of[STORE]
    console = Console(file=io.StringIO(), width=200)
    console.print(__main__.table(records))
    assert "(×3.00, ×1.50)" in console.file.getvalue()


def test_it_says_why_it_cannot_measure_here(monkeypatch):
    monkeypatch.setattr(__main__.hosts, "why_not", lambda: "that takes root")
    with pytest.raises(SystemExit, match="cannot measure here: that takes root"):
        __main__.main([])
