"""Receive payloads of single edges in the front end, to send them again or to drop them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.omni.chunks import is_last
from vllm_omni_sched.omni.stages.payloads import POLL_SECONDS, Payloads, connector_config, drop
from vllm_omni_sched.omni.stages.pool import ScheduledPool

Edge = tuple[int, int]


class EdgePayloads(Payloads):
    """Payloads of stages that branch, by edge and by the name of the run that they are for."""

    def __init__(self, pools: list[ScheduledPool]) -> None:
        super().__init__(lambda request_id: request_id)
        self._pools = pools

    def carries(self, edge: Edge) -> bool:
        """Return whether payloads of an edge go through a connector; otherwise the front end passes a prompt on."""
        config = connector_config(self._pools[edge[1]])
        return config is not None and list(edge) in config["extra"]["edges"]

    def take_from(self, edge: Edge, name: str) -> Any | None:
        """Return the payload that was sent for a run, as the first of a tuple; None if there is none."""
        source, target = map(str, edge)
        return self._connector(self._pools[edge[1]]).get(source, target, f"{name}_{source}_0")

    def send_to(self, edge: Edge, name: str, payload: Any) -> bool:
        """Send a payload for a run, and return whether it was sent."""
        source, target = map(str, edge)
        sent, _, _ = self._connector(self._pools[edge[1]]).put(source, target, f"{name}_{source}_0", payload)
        return bool(sent)

    def move(self, edge: Edge, name: str, to_name: str) -> bool:
        """Send a payload to another run, and return whether there was one. Blocks."""
        found = self.take_from(edge, name)
        return found is not None and self.send_to(edge, to_name, found[0])

    def discard_from(self, edge: Edge, name: str) -> bool:
        """Drop the payload that was sent for a run; return whether there was one."""
        source, target = map(str, edge)
        return drop(self._connector(self._pools[edge[1]]), source, target, f"{name}_{source}_0") is not None

    def discard_chunks(self, edge: Edge, names: Sequence[str], most: int) -> bool:
        """Drop the chunks that were sent for these runs and not received; return whether the last one was among them.

        A receiver takes chunks in the order in which they are sent, so the remaining ones are consecutive. What a
        killed sender has left of a chunk is removed as well. Blocks.

        Args:
            most: most chunks per name.
        """
        source, target = map(str, edge)
        connector, ended = self._connector(self._pools[edge[1]]), False
        for name in names:
            found = False
            for number in range(most):
                got = drop(connector, source, target, f"{name}_{source}_{number}")
                if found and got is None:
                    break
                found = got is not None
                ended = ended or (got is not None and is_last(got[0]))
        return ended

    def take_back_from(self, edge: Edge, names: Mapping[str, str], wait_seconds: float) -> set[str]:
        """Return the requests whose payloads were not received yet; the payloads are sent again. Blocks.

        Args:
            names: of the runs that the payloads are for, by request.
        """
        until, found = monotonic_seconds() + wait_seconds, set[str]()
        while len(found) < len(names):
            found |= {one for one, name in names.items() if one not in found and self.move(edge, name, name)}
            if monotonic_seconds() >= until:
                break
            sleep_seconds(POLL_SECONDS)
        return found
