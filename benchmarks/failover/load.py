"""Make the requests of a round of faults, and describe the round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.stages.load import Request

REQUESTS = 12
Round = dict[str, Any]
"""``kind`` of the fault, the numbers of the ``replicas`` that had it, ``wave`` with it, and ``undisturbed``."""


def asked_again(requests: Sequence[Request]) -> list[Request]:
    """Return the same requests under other names."""
    return [Request(f"{one.name}-again", one.prompt, one.thinks, one.says) for one in requests]
