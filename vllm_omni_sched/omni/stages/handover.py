"""Outputs that a replica has finished, and that the next stage is not known to have got."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Handover:
    """What a replica made for a request, on its way to the next stage.

    ``owner``: the request in whose name the work was begun; its payload is sent under that name.
    """

    request_id: str
    stage_id: int
    replica_id: int
    owner: str


class Handovers:
    """Tracks each output from when its stage has finished until the next stage shows that it has got all of it.

    A stage sends its output beside the front end, after it has said that it is done. If its replica dies in between,
    the next stage waits for an input that nobody sends any more.

    1. A handover begins when a replica has finished a stage of a request.
    2. It ends when the next stage shows that it has the whole input: with its first output where payloads are sent
       whole, and when it is through where they are sent in pieces (``pieces``).
    3. It ends, too, when the request leaves, or when the stage or an earlier one is run again for it.
    """

    def __init__(self, pieces: bool) -> None:
        self._pieces = pieces
        self._open: dict[str, dict[int, Handover]] = {}  # by request, by the stage that sends

    def __len__(self) -> int:
        """Requests with an output that may not have arrived."""
        return len(self._open)

    def finished(self, stage_id: int, replica_id: int, owner: str, receivers: Iterable[str]) -> None:
        """A replica has finished a stage, for these requests."""
        for name in receivers:
            self._open.setdefault(name, {})[stage_id] = Handover(name, stage_id, replica_id, owner)

    def spoke(self, stage_id: int, request_ids: Iterable[str], *, finished: bool) -> None:
        """A stage has put out something for these requests; ``finished``: it is through with them."""
        if finished or not self._pieces:
            for name in request_ids:
                self._drop(name, stage_id - 1)

    def runs_again(self, request_id: str, stage_id: int) -> None:
        """A stage is run again for a request, and so are all that follow."""
        for later in [one for one in self._open.get(request_id, ()) if one >= stage_id]:
            self._drop(request_id, later)

    def of_replica(self, stage_id: int, replica_id: int) -> list[Handover]:
        """What this replica has made and may not have sent."""
        found = (stages.get(stage_id) for stages in self._open.values())
        return [one for one in found if one is not None and one.replica_id == replica_id]

    def to_stage(self, request_id: str, stage_id: int) -> Handover | None:
        """What this stage may still wait for; None: it has its input, or gets none past the front end."""
        return self._open.get(request_id, {}).get(stage_id - 1)

    def forget(self, request_id: str) -> None:
        """The request has left."""
        self._open.pop(request_id, None)

    def _drop(self, request_id: str, stage_id: int) -> None:
        stages = self._open.get(request_id)
        if stages is not None and stages.pop(stage_id, None) is not None and not stages:
            del self._open[request_id]
