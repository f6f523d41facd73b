"""`CudaIpcConnector` connects stages of one host and keeps device tensors on the device."""

from __future__ import annotations

from typing import Any

from vllm_omni_sched.connectors.cuda_ipc import CudaIpcTransport
from vllm_omni_sched.connectors.cuda_ipc.options import CudaIpcConnectorOptions
from vllm_omni_sched.connectors.extra import read_extra
from vllm_omni_sched.omni.arena_connector import check_meeting
from vllm_omni_sched.omni.connector import TransportConnector


class CudaIpcConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.cuda_ipc`; without a CUDA device it warns and is an ArenaConnector.

    Args:
        config: ``extra`` of the connector: fields of `CudaIpcConnectorOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work; the message names it.
        RendezvousError: the arena's directory cannot be used.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(CudaIpcConnectorOptions, config)
        check_meeting(options.arena, type(self).__name__)
        super().__init__(config, lambda: CudaIpcTransport(options, options.arena), options.arena.put_timeout_seconds)
