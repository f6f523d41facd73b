"""Read the options of our connectors from ``extra`` of a connector in vLLM-Omni's configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.nearest import did_you_mean, is_misspelt
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.auto import AutoOptions
from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcConnectorOptions
from vllm_omni_sched.connectors.mooncake import MooncakeOptions
from vllm_omni_sched.connectors.watch import WatchOptions

OPTIONS: Mapping[str, type[BaseModel]] = {
    "ArenaConnector": ArenaOptions,
    "CudaIpcConnector": CudaIpcConnectorOptions,
    "MooncakePoolConnector": MooncakeOptions,
    "OmniAutoConnector": AutoOptions,
}
"""The options of each connector of ours, by its registered name."""
ENGINES = frozenset({"stage_id", "role", "from_stage", "to_stage", "replica_id", "outgoing"})
"""Keys that vLLM-Omni adds itself."""

Options = TypeVar("Options", bound=BaseModel)


def own_keys(extra: Mapping[str, Any], own: Collection[str], at: str) -> dict[str, Any]:
    """Return the keys of ``extra`` that are options of ours.

    Models of vLLM-Omni keep options of their own there (``codec_chunk_frames``), so an unknown key is an error only if
    it is similar to one of ours.

    Args:
        own: the names of our options; those of `WatchOptions` are ours, too, and are left out.
        at: the key of ``extra``, for messages.

    Raises:
        ConfigError: a key is misspelt; the message names it and the fix.
    """
    known = {*own, *WatchOptions.model_fields}
    for key in extra.keys() - known - ENGINES:
        if is_misspelt(key, known):
            hint = did_you_mean(key, sorted(known), f"{at}.".__add__)
            raise ConfigError(f"unknown option '{at}.{key}'; {hint}")
    return {key: value for key, value in extra.items() if key in own}


def read_extra(model: type[Options], extra: Mapping[str, Any], at: str = "extra") -> Options:
    """Return our options out of ``extra``.

    Args:
        at: the key of ``extra``, for messages.

    Raises:
        ConfigError: an option is misspelt, of the wrong type, out of range or contradicts another one; the message
            names it and the fix.
    """
    return read_options(model, own_keys(extra, model.model_fields, at), "", group=at)


def read_watch(extra: Mapping[str, Any], at: str = "extra") -> WatchOptions:
    """Return the options of the watch, which every connector of ours has beside its own; as `read_extra`."""
    own = {key: value for key, value in extra.items() if key in WatchOptions.model_fields}
    return read_options(WatchOptions, own, "", group=at)


def check_extra(name: str, extra: Mapping[str, Any], at: str) -> BaseModel | None:
    """Return the options of a connector of ours; None for a connector of others, whose options are not known here.

    Args:
        name: the registered name of the connector.

    Raises:
        ConfigError: as `read_extra`.
    """
    if name not in OPTIONS:
        return None
    read_watch(extra, at)
    return read_extra(OPTIONS[name], extra, at)
