"""Track outputs that a replica has finished and that the next stage may not have received."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Handover:
    """Represents the output of a replica for a request on its way to the next stage.

    ``owner``: the request in whose name the work was begun; its payload is sent under that name.
    """

    request_id: str
    stage_id: int
    replica_id: int
    owner: str


class Handovers:
    """Tracks each output from the end of its stage until the next stage shows that it has received all of it.

    A stage sends its output past the front end, after it has reported the end. If its replica dies in between,
    the next stage waits for an input that is never sent.

    1. A handover begins when a replica has finished a stage of a request.
    2. It ends when the next stage shows that it has the whole input: with its first output if payloads are sent
       whole, and with its end if they are sent in pieces (``pieces``).
    3. It also ends when the request leaves, or when the stage or an earlier one is run again for it.
    """

    def __init__(self, pieces: bool) -> None:
        self._pieces = pieces
        self._open: dict[str, dict[int, Handover]] = {}  # by request, by the stage that sends

    def __len__(self) -> int:
        """Return the number of requests with an output that may not have arrived."""
        return len(self._open)

    def finished(self, stage_id: int, replica_id: int, owner: str, receivers: Iterable[str]) -> None:
        """Record that a replica has finished a stage for these requests."""
        for name in receivers:
            self._open.setdefault(name, {})[stage_id] = Handover(name, stage_id, replica_id, owner)

    def on_first_output(self, stage_id: int, request_ids: Iterable[str], *, finished: bool) -> None:
        """Record that a stage has put out something for these requests; ``finished``: it is done with them."""
        if finished or not self._pieces:
            for name in request_ids:
                self._drop(name, stage_id - 1)

    def runs_again(self, request_id: str, stage_id: int) -> None:
        """Record that a stage and all later ones are run again for a request."""
        for later in [one for one in self._open.get(request_id, ()) if one >= stage_id]:
            self._drop(request_id, later)

    def of_replica(self, stage_id: int, replica_id: int) -> list[Handover]:
        """Return the outputs of this replica that may not have been sent."""
        found = (stages.get(stage_id) for stages in self._open.values())
        return [one for one in found if one is not None and one.replica_id == replica_id]

    def to_stage(self, request_id: str, stage_id: int) -> Handover | None:
        """Return the input that the stage may still wait for; None if it has arrived or passes the front end."""
        return self._open.get(request_id, {}).get(stage_id - 1)

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        self._open.pop(request_id, None)

    def _drop(self, request_id: str, stage_id: int) -> None:
        stages = self._open.get(request_id)
        if stages is not None and stages.pop(stage_id, None) is not None and not stages:
            del self._open[request_id]
