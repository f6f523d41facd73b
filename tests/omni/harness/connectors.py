"""Connectors out of tree: to prove that the one named in the YAML carries the payloads, and that it matters how."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory


class LoggingConnector(SharedMemoryConnector):
    """vLLM-Omni's own, which adds a line of JSON to the file `extra["log"]` for each payload put and each one got."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._log = config["log"]
        self._write(did="made", role=config.get("role"))

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        result = super().put(from_stage, to_stage, put_key, data)
        if result[0]:
            self._write(did="put", edge=[from_stage, to_stage], key=put_key, bytes=result[1], type=type(data).__name__)
        return result

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        result = super().get(from_stage, to_stage, get_key, metadata)
        if result is not None:
            self._write(did="get", edge=[from_stage, to_stage], key=get_key, bytes=result[1], metadata=metadata)
        return result

    def cleanup(self, request_id: str) -> None:
        self._write(did="cleanup", key=request_id)
        super().cleanup(request_id)

    def _write(self, **what: Any) -> None:
        line = json.dumps({"stage": self.stage_id, "pid": os.getpid(), **what}) + "\n"
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())  # one write: lines of several processes do not mix
        finally:
            os.close(file)


class ChangingConnector(SharedMemoryConnector):
    """Connector that tests must notice: all floats arrive as 0.5."""

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        result = super().get(from_stage, to_stage, get_key, metadata)
        if result is not None:
            for values in result[0].values():
                for name, value in values.items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        values[name] = torch.full_like(value, 0.5)
        return result


class CutConnector(SharedMemoryConnector):
    """A link that is cut as long as the file `extra["cut"]` exists.

    Nothing arrives then, and each payload is refused `REFUSALS` times, once with an exception: vLLM-Omni tries to send
    a whole payload four times, without a pause. A byte is added to the file for each refusal.
    """

    REFUSALS = 2

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._cut = config["cut"]
        self._refused: dict[str, int] = {}

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        refused = self._refused.get(put_key, 0)
        if refused < self.REFUSALS and self._is_cut(b"."):
            self._refused[put_key] = refused + 1
            if refused:
                raise ConnectionError("the link is cut")
            return False, 0, None
        self._refused.pop(put_key, None)
        return super().put(from_stage, to_stage, put_key, data)

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        return None if self._is_cut() else super().get(from_stage, to_stage, get_key, metadata)

    def _is_cut(self, told: bytes = b"") -> bool:
        """Return whether the link is cut; ``told`` is added to its file then."""
        try:
            file = os.open(self._cut, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return False
        try:
            os.write(file, told)
        finally:
            os.close(file)
        return True


def register() -> None:
    """Register the connectors; the entry point in `vllm.general_plugins`, sometimes called twice in a process."""
    for connector in (ChangingConnector, CutConnector, LoggingConnector):
        if connector.__name__ not in OmniConnectorFactory.list_registered_connectors():  # registering twice raises
            OmniConnectorFactory.register_connector(connector.__name__, connector)
