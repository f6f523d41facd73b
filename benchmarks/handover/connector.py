"""`TimedConnector`: all connectors that are compared, in one pipeline; the name of a request says which carries it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

from benchmarks.handover import VARIANTS
from benchmarks.handover.stamps import GET, PUT, YIELD, Stamps

BUFFERS = 8
YIELD_EVERY = 32
"""Messages got: that of one of them is measured is what the others wait for, too."""


class TimedConnector(SharedMemoryConnector):
    """Writes when each message was put and got, and makes messages as large as those of large models.

    Besides what the tiny models say, the first message of a request on an edge carries ``extra["first_bytes"]`` (hidden
    states of a prompt), and each later one ``extra["later_bytes"]`` (those of a step). What is added is made before the
    clock runs, and taken off after.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        own = {key: value for key, value in config.items() if key not in ("folder", "first_bytes", "later_bytes")}
        self._by_name = {
            name: OmniConnectorFactory.create_connector(ConnectorSpec(name, {**own, **extra}))
            for name, extra in VARIANTS.items()
        }
        sizes = (config["first_bytes"], config["later_bytes"])
        self._states = [[torch.randn(-(-nbytes // 256), 64) for _ in range(BUFFERS)] for nbytes in sizes]
        self._stamps = Stamps(Path(config["folder"]))
        self._puts = self._gets = 0

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        self._puts += 1
        states = self._states[not put_key.endswith("_0")][self._puts % BUFFERS]
        payload = {"payload": data, "states": states, "check": float(states[-1, -1])}
        connector = self._of(put_key)
        begin = time.monotonic()
        result = connector.put(from_stage, to_stage, put_key, payload)
        self._stamps.write(PUT, f"{from_stage}->{to_stage}", put_key, begin, time.monotonic())
        return result

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        connector = self._of(get_key)
        begin = time.monotonic()
        result = connector.get(from_stage, to_stage, get_key, metadata)
        end = time.monotonic()
        if result is None:
            self._stamps.looked(f"{from_stage}->{to_stage}", get_key, begin, end)
            return None
        self._gets += 1
        if self._gets % YIELD_EVERY == 0:
            time.sleep(0)  # how long other threads keep the interpreter is measured
            self._stamps.write(YIELD, f"{from_stage}->{to_stage}", get_key, end, time.monotonic())
        self._stamps.write(GET, f"{from_stage}->{to_stage}", get_key, begin, end)
        payload, nbytes = result
        if float(payload["states"][-1, -1]) != payload["check"]:
            raise RuntimeError(f"message {get_key!r} is not what was put")
        return payload["payload"], nbytes

    def cleanup(self, request_id: str) -> None:
        self._of(request_id).cleanup(request_id)

    def reap_consumed(self) -> None:
        for connector in self._by_name.values():
            connector.reap_consumed()

    def health(self) -> dict[str, Any]:
        return {name: connector.health() for name, connector in self._by_name.items()}

    def close(self) -> None:
        for connector in self._by_name.values():
            connector.close()

    def _of(self, key: str) -> Any:
        return self._by_name[key.partition("-")[0]]


def register() -> None:
    """Register the timed connector; the entry point in `vllm.general_plugins`."""
    from vllm_omni_sched.plugin import register as register_ours

    register_ours()  # in whichever order plugins are loaded
    if TimedConnector.__name__ not in OmniConnectorFactory.list_registered_connectors():
        OmniConnectorFactory.register_connector(TimedConnector.__name__, TimedConnector)
