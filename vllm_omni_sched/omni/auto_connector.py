"""`OmniAutoConnector` chooses the transport of each message by distance and health."""

from __future__ import annotations

import os
from typing import Any

from vllm_omni_sched.connectors.auto import AutoOptions, MoreWays, auto_transport
from vllm_omni_sched.connectors.extra import ENGINES, read_extra
from vllm_omni_sched.omni.arena_connector import check_meeting
from vllm_omni_sched.omni.connector import TransportConnector

REPLICA_VARIABLE = "VLLM_OMNI_REPLICA_ID"


class OmniAutoConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.routing`.

    Args:
        config: ``extra`` of the connector: fields of `AutoOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work; the message names it.
        RendezvousError: the arena's directory cannot be used.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(AutoOptions, config)
        if options.arena is not None:
            check_meeting(options.arena, type(self).__name__)
        engine = {key: value for key, value in config.items() if key in ENGINES}
        more = _more(options, engine)
        stage, replica = _served(engine)
        super().__init__(config, lambda: auto_transport(options, more, stage, replica), options.put_timeout_seconds)


def _served(engine: dict[str, Any]) -> tuple[str | None, int]:
    """Return stage and replica of this process as far as vLLM-Omni states them."""
    stage, replica = engine.get("stage_id", -1), engine.get("replica_id", os.environ.get(REPLICA_VARIABLE, 0))
    return None if stage in (None, -1) else str(stage), int(replica or 0)


def _more(options: AutoOptions, engine: dict[str, Any]) -> MoreWays | None:
    if not options.foreign:
        return None
    from vllm_omni_sched.omni.foreign_transport import foreign_ways  # imported only if needed, with its requirements

    return lambda ours: foreign_ways(options.foreign, ours, engine)
