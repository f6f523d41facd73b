"""Read the options of our connectors from ``extra`` of vLLM-Omni's stage config."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.nearest import did_you_mean, is_misspelt
from vllm_omni_sched.connectors.watch import WatchOptions

ENGINES = frozenset({"stage_id", "role", "from_stage", "to_stage", "replica_id", "outgoing"})
"""Keys that vLLM-Omni adds itself."""

Options = TypeVar("Options", bound=BaseModel)


def options_from_extra(model: type[Options], extra: dict[str, Any], connector: str, beside: bool = False) -> Options:
    """Return our options out of ``extra``.

    Models of vLLM-Omni keep options of their own there (``codec_chunk_frames``), so an unknown key is an
    error only if it is similar to one of ours.

    Args:
        beside: a second model is read from the same ``extra``, whose keys were checked for the first one.

    Raises:
        ConfigError: an option is misspelt, of the wrong type or out of range; the message names it and the fix.
    """
    own, known = model.model_fields, {*model.model_fields, *WatchOptions.model_fields}
    for key in () if beside else extra.keys() - known - ENGINES:
        if is_misspelt(key, known):
            raise ConfigError(f"{connector}: unknown option {key!r} in `extra`; {did_you_mean(key, sorted(known))}")
    try:
        return model.model_validate({key: value for key, value in extra.items() if key in own})
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"])
        raise ConfigError(
            f"{connector}: option {where!r} in `extra`: {found['msg']}, got {found['input']!r}"
        ) from error
