"""`TimedConnector`: all connectors that are compared, in one pipeline; the name of a request says which carries it."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

from benchmarks.handover import VARIANTS
from benchmarks.handover.stamps import GET, PUT, YIELD, Stamps

BUFFERS = 8
CHECK_EVERY = 0.01
"""Seconds between two looks at what was got, and two measurements of the floor."""


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
        self._puts = 0
        self._got: deque[tuple[str, torch.Tensor, float]] = deque()  # to be checked
        self._aside: threading.Thread | None = None
        self._wrong = ""  # the key of a message that was altered
        self._asked = threading.local()  # the last key of each thread

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
        connector, self._asked.key = self._of(get_key), get_key
        begin = time.monotonic()
        result = connector.get(from_stage, to_stage, get_key, metadata)
        end = time.monotonic()
        if result is None:
            self._stamps.looked(f"{from_stage}->{to_stage}", get_key, begin, end)
            return None
        self._stamps.write(GET, f"{from_stage}->{to_stage}", get_key, begin, end)
        if self._wrong:
            raise RuntimeError(f"message {self._wrong!r} is not what was put")
        payload, nbytes = result
        self._got.append((get_key, payload.pop("states"), payload["check"]))
        if self._aside is None:
            self._aside = threading.Thread(target=self._check, name="check", daemon=True)
            self._aside.start()
        return payload["payload"], nbytes

    def _check(self) -> None:
        """Check and drop what was got, and measure how long other threads and processes keep interpreter and cores.

        Reading and dropping a tensor release the interpreter lock, and so does the measurement: the receiving thread
        would lose it for milliseconds by what its loop does not do, as the engine's thread drops what it has received.
        """
        while True:
            time.sleep(CHECK_EVERY)
            key = ""
            while self._got:
                key, states, check = self._got.popleft()
                if float(states[-1, -1]) != check:
                    self._wrong = key
            if key:
                begin = time.monotonic()
                time.sleep(0)
                self._stamps.write(YIELD, "", key, begin, time.monotonic())

    def missed(self) -> Any:
        """Return what the connector of this thread's last key tells; vLLM-Omni's connector tells nothing."""
        return getattr(self._of(self._asked.key), "missed", lambda: None)()

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
