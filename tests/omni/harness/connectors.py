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


def register() -> None:
    """Register the connectors; the entry point in `vllm.general_plugins`, sometimes called twice in a process."""
    for connector in (ChangingConnector, LoggingConnector):
        if connector.__name__ not in OmniConnectorFactory.list_registered_connectors():  # registering twice raises
            OmniConnectorFactory.register_connector(connector.__name__, connector)
