"""`OmniAutoConnector`: the connector to name when one does not want to choose."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaPath
from vllm_omni_sched.connectors.base import Path
from vllm_omni_sched.connectors.compression import CompressionOptions, Compressor
from vllm_omni_sched.connectors.routing import RoutedPath, RoutingOptions
from vllm_omni_sched.connectors.routing.path import Way
from vllm_omni_sched.omni.arena_connector import check_meeting
from vllm_omni_sched.omni.connector import PathConnector
from vllm_omni_sched.omni.extra import options_from_extra

HOST, NETWORK = 0, 1  # distances


class AutoOptions(RoutingOptions):
    """``extra`` of an OmniAutoConnector."""

    arena: ArenaOptions | None = Field(
        ArenaOptions(), description="Options of the path within a host; null: there is none."
    )
    compression: CompressionOptions = Field(
        CompressionOptions(), description="When buffers are compressed on paths between hosts."
    )
    put_timeout_seconds: float = Field(30.0, ge=0, description="How long `put` waits for room or for its receiver.")


class OmniAutoConnector(PathConnector):
    """See `vllm_omni_sched.connectors.routing`.

    Args:
        config: ``extra`` of the connector: fields of `AutoOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work; the message names it.
        RendezvousError: the arena's directory cannot be used.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = options_from_extra(AutoOptions, config, type(self).__name__)
        if options.arena is not None:
            check_meeting(options.arena, type(self).__name__)
        super().__init__(config, lambda: _path(options), options.put_timeout_seconds)


def _path(options: AutoOptions) -> Path:
    ways = [Way(ArenaPath(options.arena), HOST)] if options.arena is not None else []
    far = any(way.distance for way in ways)
    return RoutedPath(ways, options, Compressor(options.compression) if far else None)
