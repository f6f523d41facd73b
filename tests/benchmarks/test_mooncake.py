"""What `benchmarks.mooncake` makes of what it was told; the measuring itself takes a master."""

import io
import random

import pytest
from rich.console import Console

from benchmarks.mooncake import OURS, THEIRS, __main__


class Peer:
    """Says how long a call took, in the order of the calls."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def ask(self, **request):
        self.asked.append((request["do"], request["key"]))
        return {"seconds": self.seconds}


def samples(monkeypatch):
    monkeypatch.setitem(__main__.MESSAGES, "1 MB", 4)
    sides = {OURS: (Peer(1.0), Peer(2.0)), THEIRS: (Peer(4.0), Peer(5.0))}
    rounds = [__main__.one_round(sides, "1 MB", turn, random.Random(0)) for turn in range(3)]
    return sides, {("1 MB", side): [one[side] for one in rounds] for side in sides}


def test_each_message_is_put_and_then_got_by_both_sides(monkeypatch):
    sides, _ = samples(monkeypatch)
    keys = {side: [key for _, key in sender.asked] for side, (sender, _) in sides.items()}
    assert keys[OURS] == keys[THEIRS] == [key for _, key in sides[OURS][1].asked]
    assert len(set(keys[OURS])) == 3 * (4 + __main__.WARM_UP)


def test_theirs_over_ours_is_of_the_same_round(monkeypatch):
    records = __main__.record(samples(monkeypatch)[1])
    ours = {one["measure"]: one for one in records if one["variant"] == OURS}
    assert [ours[measure]["theirs_over_it"] for measure in __main__.MEASURES] == [3.0, 3.0, 4.0, 2.5]
    assert all("theirs_over_it" not in one for one in records if one["variant"] == THEIRS)
    assert ours["put and get"]["median"] == 3.0
    console = Console(file=io.StringIO(), width=120)
    console.print(__main__.table(records))
    assert "(×3.00)" in console.file.getvalue()


def test_it_says_why_it_cannot_measure_here(monkeypatch):
    monkeypatch.setattr(__main__, "why_not", lambda: "there is no mooncake_master")
    with pytest.raises(SystemExit, match="cannot measure here: there is no mooncake_master"):
        __main__.main([])
