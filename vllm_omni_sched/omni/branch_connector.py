"""`OmniBranchConnector` carries payloads between stages that branch, over any other connector."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConnectorError
from vllm_omni_sched.connectors.extra import ENGINES
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.chunks import ChunkJoin, as_last

logger = get_logger(__name__)

NAME = "OmniBranchConnector"
MARK = ">"
"""Ends the name of a run in the external id of a request; after it come the runs of the stages that get its output."""

_ADDRESSED = re.compile(
    rf"(?P<name>.*){MARK}(?P<suffix>\d+):(?P<targets>[\d,~]*)_(?P<stage>\d+)_(?P<piece>\d+)", re.DOTALL
)
_PLAIN = re.compile(r"(?P<name>.*)_(?P<stage>\d+)_(?P<piece>\d+)", re.DOTALL)
KEPT_SECONDS = 60.0  # inputs of a join for which nobody asks any more are dropped
POLL_SECONDS = 0.001


def address(request_id: str, suffix: str, targets: Mapping[int, str]) -> str:
    """Return the external id of a request in a stage.

    Args:
        suffix: of the name of its run there; under this name it gets its input.
        targets: the suffixes of the names of its runs in the stages that its output is for, by stage.
    """
    listed = ",".join(f"{stage}{other}" for stage, other in targets.items())
    return f"{request_id}{suffix}{MARK}{len(suffix)}:{listed}"


class OmniBranchConnector(SharedMemoryConnector):
    """Connector of stages of which several read one, or one reads several.

    It subclasses SharedMemoryConnector because vLLM-Omni withdraws the chunks of an aborted request from no other
    class, as for `TransportConnector`.

    vLLM-Omni sends the output of a stage to the stage with the next id, and receives from the one before, under the
    external id of the request.

    1. The external id names the stages that an output is for (`address`); it is sent to each of these, and only there.
       So each has its own copy of each chunk, under a key of its own.
    2. A stage that reads several others gets their payloads as one, when all are there. A value that several send
       under the same name is that of the first of them. If it reads chunks, it gets one, which is the last as well,
       when all that it reads have ended (`ChunkJoin`).
    3. A key without an address is that of one edge: so the front end takes and sends payloads.

    Args:
        config: ``connector``: the registered name of the connector that carries the messages; ``extra``: its options;
            ``edges``: pairs of stages that it connects; ``chunked``: the stages that read chunks. vLLM-Omni adds
            others.
    """

    def __init__(self, config: dict[str, Any]) -> None:  # that of SharedMemoryConnector makes what is not needed here
        engine = {key: value for key, value in config.items() if key in ENGINES}
        self._carrier = OmniConnectorFactory.create_connector(
            ConnectorSpec(config["connector"], {**config["extra"], **engine})
        )
        self._sources: dict[str, list[str]] = {}
        for source, target in config["edges"]:
            self._sources.setdefault(str(target), []).append(str(source))
        self._chunked = {str(one) for one in config.get("chunked", ())}
        self._lock = threading.Lock()
        self._chunks: dict[tuple[str, str], tuple[float, ChunkJoin]] = {}  # of joins, by stage and run
        self._arrived: dict[
            tuple[str, str], tuple[float, dict[str, tuple[Any, int]]]
        ] = {}  # of joins, by stage and run
        self._conflicts: set[str] = set()  # names that several sources send, and that were logged

    @property
    def stage_id(self) -> Any:
        """Return the id of the stage that uses the connector."""
        return getattr(self._carrier, "stage_id", -1)

    @stage_id.setter
    def stage_id(self, stage_id: int) -> None:
        self._carrier.stage_id = stage_id

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Send a payload to all stages that the key names; return whether all got it, and its bytes."""
        found = _ADDRESSED.fullmatch(put_key)
        if found is None:
            carrier, key = self.on_edge(from_stage, to_stage, put_key)
            return carrier.put(from_stage, to_stage, key, data)  # type: ignore[no-any-return]
        total = 0
        for stage, key in _targets(found, from_stage):
            sent, nbytes, _ = self._carrier.put(from_stage, stage, key, data)
            if not sent:
                return False, 0, None
            total += nbytes
        return True, total, None

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Return the payload for a stage, and its bytes; None as long as that of one of its sources is missing."""
        found = _ADDRESSED.fullmatch(get_key)
        if found is None:
            carrier, key = self.on_edge(from_stage, to_stage, get_key)
            return carrier.get(from_stage, to_stage, key)  # type: ignore[no-any-return]
        sources = self._sources.get(to_stage, [])
        if len(sources) == 1:
            key = _edge_key(found["name"], sources[0], to_stage, found["piece"])
            return self._carrier.get(sources[0], to_stage, key)
        if to_stage in self._chunked:
            return self._joined_chunks(to_stage, sources, found["name"]) if found["piece"] == "0" else None
        return self._joined(to_stage, sources, found["name"], found["piece"])

    def on_edge(self, from_stage: str, to_stage: str, key: str) -> tuple[Any, str]:
        """Return the connector that carries the messages, and its key for a key that has no address."""
        name, piece = _plain(key)
        return self._carrier, _edge_key(name, from_stage, to_stage, piece)

    def _joined_chunks(self, stage: str, sources: list[str], name: str) -> tuple[Any, int] | None:
        now = monotonic_seconds()
        with self._lock:
            for gone in [one for one, (asked, _) in self._chunks.items() if now > asked + KEPT_SECONDS]:
                del self._chunks[gone]
            _, join = self._chunks.get((stage, name), (now, ChunkJoin(sources)))
            self._chunks[stage, name] = now, join

            def take(source: str, number: int) -> tuple[Any, int] | None:
                return self._carrier.get(source, stage, _edge_key(name, source, stage, str(number)))

            try:
                ended = join.collect(take)
            except TypeError as error:
                raise ConnectorError(f"stage {stage} reads several stages in chunks, and {error}, not a dict") from None
            if not ended:
                return None
            del self._chunks[stage, name]
        payload: dict[str, Any] = {}
        for source, one in join.payloads().items():
            self._add(payload, one, source, stage)
        return as_last(payload), join.nbytes

    def _joined(self, stage: str, sources: list[str], name: str, piece: str) -> tuple[Any, int] | None:
        now = monotonic_seconds()
        with self._lock:
            for gone in [one for one, (asked, _) in self._arrived.items() if now > asked + KEPT_SECONDS]:
                del self._arrived[gone]
            _, arrived = self._arrived.get((stage, name), (now, {}))
            for source in sources:
                if source not in arrived:
                    found = self._carrier.get(source, stage, _edge_key(name, source, stage, piece))
                    if found is not None:
                        arrived[source] = found
            if len(arrived) < len(sources):
                self._arrived[stage, name] = now, arrived
                return None
            self._arrived.pop((stage, name), None)
        payload: dict[str, Any] = {}
        for source in sources:
            self._add(payload, arrived[source][0], source, stage)
        return payload, sum(nbytes for _, nbytes in arrived.values())

    def _add(self, payload: dict[str, Any], other: Any, source: str, stage: str) -> None:
        if not isinstance(other, Mapping):
            raise ConnectorError(
                f"stage {stage} reads several stages, and the payload of stage {source} has no names that tell it from "
                f"those of the others: it is {type(other).__name__}, and must be a dict"
            )
        for name, value in other.items():
            known = payload.get(name)
            if name not in payload:
                payload[name] = dict(value) if isinstance(value, Mapping) else value
            elif isinstance(known, dict) and isinstance(value, Mapping):
                for inner, each in value.items():
                    if inner in known:
                        self._tell(f"{name}.{inner}", source, stage)
                    known.setdefault(inner, each)
            else:
                self._tell(name, source, stage)

    def _tell(self, name: str, source: str, stage: str) -> None:
        if name not in self._conflicts:
            self._conflicts.add(name)
            logger.warning(
                "stage %s gets %r from several of the stages that it reads; that of stage %s is not used",
                stage,
                name,
                source,
            )

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """Return a payload like `get`, waiting until ``deadline`` (of the monotonic clock)."""
        while monotonic_seconds() < deadline:
            found = self.get(from_stage, to_stage, get_key, metadata)
            if found is not None:
                return found
            sleep_seconds(POLL_SECONDS)
        return None

    def cleanup(self, request_id: str) -> None:
        """Withdraw messages that were put under exactly this key, from all stages that it names."""
        found = _ADDRESSED.fullmatch(request_id)
        keys = [request_id] if found is None else [key for _, key in _targets(found, found["stage"])]
        for key in keys:
            self._carrier.cleanup(key)

    def reap_consumed(self) -> None:
        """Free the room of messages that were received."""
        self._carrier.reap_consumed()

    def health(self) -> dict[str, Any]:
        """Return the health of the connector that carries the messages."""
        found: dict[str, Any] = self._carrier.health()
        return found

    def close(self) -> None:
        """Release all resources."""
        carrier = getattr(self, "_carrier", None)  # `__del__` also calls this when the constructor has failed
        if carrier is not None:
            carrier.close()


def _targets(found: re.Match[str], from_stage: str) -> list[tuple[str, str]]:
    """Return the stages that a key names, each with the key of its own copy."""
    name = found["name"]
    request_id = name[: len(name) - int(found["suffix"])]
    each = [target.partition("~") for target in found["targets"].split(",") if target]
    return [
        (stage, _edge_key(request_id + mark + number, from_stage, stage, found["piece"]))
        for stage, mark, number in each
    ]


def _edge_key(name: str, from_stage: str, to_stage: str, piece: str) -> str:
    """Return a key that differs between the edges of a request: some connectors tell messages apart by it alone."""
    return f"{name}@{to_stage}_{from_stage}_{piece}"


def _plain(key: str) -> tuple[str, str]:
    found = _PLAIN.fullmatch(key)
    return (key, "0") if found is None else (found["name"], found["piece"])
