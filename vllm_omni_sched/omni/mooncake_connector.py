"""`MooncakePoolConnector` connects stages on several hosts through a Mooncake store."""

from __future__ import annotations

from typing import Any

from vllm_omni_sched.connectors.extra import read_extra
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from vllm_omni_sched.omni.connector import TransportConnector


class MooncakePoolConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.mooncake`.

    Args:
        config: ``extra`` of the connector: fields of `MooncakeOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work, or the library is not installed; the message names it.
        RendezvousError: the master cannot be reached.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(MooncakeOptions, config)
        super().__init__(config, lambda: MooncakeTransport(options), options.put_timeout_seconds)
