"""Write the calibration file with the measured costs of an engine."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm_omni_sched.errors import ConfigError

FORMAT = "vllm-omni-sched calibration"
VERSION = 1


def write(path: Path, source: dict[str, Any], costs: dict[str, Any], kv_tokens: int) -> None:
    """Write the file atomically: an existing file stays until the new one is complete.

    Args:
        source: source of the numbers: command, versions, processor, date, model.
        costs: as `fit.fit` returns them.
        kv_tokens: tokens that fit into the engine's KV cache.

    Raises:
        ConfigError: the file cannot be written.
    """
    body = {"format": FORMAT, "version": VERSION, "source": source, **costs, "kv_tokens": kv_tokens}
    draft = None
    try:
        number, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(number, "w") as file:
            file.write(json.dumps(body, indent=1) + "\n")
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError as error:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)
        raise ConfigError(f"the calibration cannot be written to {path}: {error.strerror}") from None
