"""Copy payloads of a stage for several requests, or for a request that needs them again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.unfinished import remove_left, remove_unfinished

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

POLL_SECONDS = 0.002
REMEMBERED = 1 << 14  # requests
NO_STAGE = -1  # vLLM-Omni's mark of a process that serves no stage


class Payloads:
    """Receives messages from an edge, and sends them again under other names, with the connector of the stages.

    Whole payloads only: in async-chunk mode a payload is sent in pieces, and a group shares all stages.

    Args:
        external: returns the name under which connectors know the present run of a request.
    """

    def __init__(self, external: Callable[[str], str]) -> None:
        self._connectors: dict[str, Any] = {}  # by name and options: stages with equal ones share a connector
        self._connecting = threading.Lock()  # payloads are received and sent in threads
        self._left: deque[str] = deque(maxlen=REMEMBERED)  # requests that have left, the last one last
        self.external = external

    @staticmethod
    def arrive_at(pool: ScheduledPool) -> bool:
        """Return whether a stage receives payloads by a connector."""
        return pool.stage_id > 0 and connector_config(pool) is not None

    def copy(self, pool: ScheduledPool, sent_as: str, names: Sequence[str]) -> bool:
        """Receive the payload that was sent to a stage for a run, and send it to each of these requests.

        Args:
            sent_as: the name of the run that it was sent for, as returned by `external`.
            names: requests, possibly including that of this run.

        Returns:
            Whether there was a payload.
        """
        found = self.take(pool, sent_as)
        if found is None:
            return False
        self.send(pool, names, found[0])
        return True

    def take(self, pool: ScheduledPool, sent_as: str) -> Any | None:
        """Return the payload that was sent to a stage for a run, as the first of a tuple; None if there is none."""
        edge = str(pool.stage_id - 1), str(pool.stage_id)
        return self._connector(pool).get(*edge, f"{sent_as}_{edge[0]}_0")

    def send(self, pool: ScheduledPool, names: Sequence[str], payload: Any) -> None:
        """Send a payload to a stage, to each of these requests."""
        edge = str(pool.stage_id - 1), str(pool.stage_id)
        for name in names:
            sent, _, _ = self._connector(pool).put(*edge, f"{self.external(name)}_{edge[0]}_0", payload)
            if not sent:
                logger.error(
                    "sending the payload of request %s to stage %d failed; the request keeps waiting in that stage",
                    name,
                    pool.stage_id,
                )

    def take_back(
        self,
        pool: ScheduledPool,
        names: Sequence[str],
        wait_seconds: float,
        sent_as: Mapping[str, str] | None = None,
    ) -> set[str]:
        """Return the requests whose payloads were not received yet; the payloads are sent again. Blocks.

        Args:
            sent_as: the name under which a payload was sent, by request; default: that of the present run.
        """
        until, found = monotonic_seconds() + wait_seconds, set[str]()
        before = dict.fromkeys(names) | dict(sent_as or {})
        while len(found) < len(names):
            missing = [name for name in names if name not in found]
            found |= {name for name in missing if self.copy(pool, before[name] or self.external(name), [name])}
            if monotonic_seconds() >= until:
                break
            sleep_seconds(POLL_SECONDS)
        return found

    def discard(self, pool: ScheduledPool, names: Sequence[str], most: int) -> None:
        """Receive and drop the pieces that were sent to a stage under these names and not received yet. Blocks.

        A receiver takes pieces in the order in which they are sent, so the remaining ones are consecutive. What a
        killed sender has left of a piece is removed as well.

        Args:
            most: most pieces per name.
        """
        connector = self._connector(pool)
        edge = str(pool.stage_id - 1), str(pool.stage_id)
        for name in names:
            found = False
            for piece in range(most):
                lies = drop(connector, *edge, f"{name}_{edge[0]}_{piece}") is not None
                if found and not lies:
                    break
                found = lies

    def left(self, request_ids: Iterable[str]) -> None:
        """Record requests that have left, so that nobody may receive what was sent for them and is not received yet."""
        self._left.extend(request_ids)

    def remove_left(self) -> None:
        """Remove what requests that have left have left behind; call it when no stage sends any more.

        Of a request that was aborted or ran more than once, something may always lie there: what is sent last is
        removed seconds after its end, and the pipeline may end before.
        """
        remove_left(set(self._left))

    def close(self) -> None:
        for connector in self._connectors.values():
            connector.close()
        self._connectors.clear()

    def _connector(self, pool: ScheduledPool) -> Any:
        config = connector_config(pool) or {}
        extra = dict(config.get("extra") or {})
        if "stage_id" in extra:  # else the front end would announce the stage on its own host
            extra["stage_id"] = NO_STAGE
        # each connector over an arena opens the files of all senders: one for each stage would multiply them
        which = repr((config["name"], extra))
        with self._connecting:
            if which not in self._connectors:
                from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
                from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

                self._connectors[which] = OmniConnectorFactory.create_connector(ConnectorSpec(config["name"], extra))
            return self._connectors[which]


def drop(connector: Any, from_stage: str, to_stage: str, key: str) -> tuple[Any, int] | None:
    """Receive a message to drop it, or remove what a killed sender has left of it; return what was received."""
    found: tuple[Any, int] | None = connector.get(from_stage, to_stage, key)
    if found is None:
        remove_unfinished(connector, from_stage, to_stage, key)
    return found


def connector_config(pool: ScheduledPool) -> dict[str, Any] | None:
    """Return name and options of the connector of a stage; None if it has none."""
    config = getattr(getattr(pool.stage_vllm_config, "model_config", None), "stage_connector_config", None)
    if config is None:
        return None
    if not isinstance(config, dict):
        config = {"name": getattr(config, "name", None), "extra": getattr(config, "extra", None)}
    return config if config.get("name") else None
