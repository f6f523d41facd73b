"""The file that says what an engine's work costs, as it was measured."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm_omni_sched.errors import ConfigError

FORMAT = "vllm-omni-sched calibration"
VERSION = 1


def write(path: Path, source: dict[str, Any], costs: dict[str, Any], kv_tokens: int) -> None:
    """Write it whole or not at all: what was there before stays until then.

    Args:
        source: where the numbers are from: command, versions, processor, date, model.
        costs: as `fit.fit` returns them.
        kv_tokens: tokens of KV cache that the engine has room for.

    Raises:
        ConfigError: it cannot be written there.
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
