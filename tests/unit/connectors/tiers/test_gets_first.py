"""A get goes before messages that are to be moved."""

from __future__ import annotations

import threading

import pytest

from tests.support.arena import EDGE, LONG, pixels
from tests.support.tiers import PAYLOAD, expect, small_tiers
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, make_message
from vllm_omni_sched.connectors.tiers.worker import GetsFirst
from vllm_omni_sched.connectors.transport import Lease, Transport

A_MOMENT = 0.2  # in which a mover that does not give way would have gone on


def test_a_mover_waits_for_the_gets_that_run() -> None:
    said: list[str] = []
    asked, moved = threading.Event(), threading.Event()
    gets = GetsFirst()

    def move() -> None:
        asked.set()
        gets.give_way()
        said.append("move")
        moved.set()

    mover = threading.Thread(target=move)
    with gets.getting():
        mover.start()
        assert asked.wait(LONG)
        moved.wait(0.01)  # below its patience
        said.append("got")
    mover.join()
    assert said == ["got", "move"]


def test_receivers_that_never_stop_asking_do_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_sched.connectors.tiers.worker.PATIENCE_SECONDS", 0.001)
    gets = GetsFirst()
    with gets.getting():
        gets.give_way()
    with pytest.raises(KeyError), gets.getting():
        raise KeyError
    monkeypatch.setattr("vllm_omni_sched.connectors.tiers.worker.PATIENCE_SECONDS", LONG)
    gets.give_way()  # nobody gets any more


class Told:
    """Files that say what is done with them; a get that comes while the first message is moved takes a while."""

    def __init__(self, path: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.receiver: threading.Thread | None = None
        self.wants = lambda: None
        self._next = threading.Event()
        self._in_get = threading.Event()
        self._lease, self._get = path.lease, path.get
        monkeypatch.setattr(path, "lease", self.lease)
        monkeypatch.setattr(path, "get", self.get)

    def lease(self, edge: Edge, key: str) -> Lease | None:
        self.said.append(f"move {key}")
        if self.receiver is None:
            self.receiver = threading.Thread(target=lambda: self.wants())
            self.receiver.start()
            assert self._in_get.wait(LONG)
        else:
            self._next.set()
        return self._lease(edge, key)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        self._in_get.set()
        self._next.wait(A_MOMENT)
        found = self._get(edge, key)
        self.said.append(f"get {key}")
        return found


def test_a_get_that_comes_while_messages_are_to_be_moved_goes_first(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_sched.connectors.tiers.worker.PATIENCE_SECONDS", LONG)
    path = small_tiers(root, long_wait_seconds=0.001, low_water=0.5, soon_seconds=100.0)
    for number in range(60):
        path.put(make_message(EDGE, f"{number}", {"x": pixels(number, PAYLOAD)}))
    below = sorted((item for item in path.ledger.all() if item.tier), key=lambda item: int(item.key))
    assert len(below) >= 4
    expect(path, 50.0)  # those that were put first are needed first
    while (there := path.ledger.used[0, "image"]) > 0.3 * 100 * 8 * 1024:
        assert path.get(EDGE, next(item.key for item in path.ledger.all() if not item.tier)) is not None
        path.reap()
        assert path.ledger.used[0, "image"] < there
    wanted = below[-1].key
    told = Told(path._transports[1], monkeypatch)
    told.wants = lambda: path.get(EDGE, wanted)  # type: ignore[assignment, return-value]
    path.move()
    assert told.receiver is not None
    told.receiver.join()
    first, second = below[0].key, below[1].key
    assert told.said[:3] == [f"move {first}", f"get {wanted}", f"move {second}"]
    path.close()
