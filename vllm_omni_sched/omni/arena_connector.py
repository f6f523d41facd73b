"""`ArenaConnector` connects stages of one host through shared memory that is allocated once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.arena.meeting import ARENA_VARIABLE, sweep
from vllm_omni_sched.connectors.extra import read_extra
from vllm_omni_sched.omni.connector import TransportConnector


class ArenaConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.arena`.

    Args:
        config: ``extra`` of the connector: fields of `ArenaOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work; the message names it.
        RendezvousError: the arena's directory cannot be used.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(ArenaOptions, config)
        check_meeting(options, type(self).__name__)
        super().__init__(config, lambda: ArenaTransport(options), options.put_timeout_seconds)


def check_meeting(options: ArenaOptions, connector: str) -> None:
    """Check that stages can find each other, and remove files left by killed runs.

    Raises:
        ConfigError: the stages would not find each other.
    """
    if options.arena is None and ARENA_VARIABLE not in os.environ:
        raise ConfigError(
            f"{connector}: {ARENA_VARIABLE} is not set; vLLM-Omni with the plugin sets it in its stages. Set "
            "the option `arena` to one name for all stages of this pipeline"
        )
    sweep(Path(options.directory) / f"vllm-omni-sched-{os.geteuid()}")
