"""Put the chunks of several stages together, for a stage that reads all of them as one payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

META, FINISHED, SEGMENT, OVERRIDES = "meta", "finished", "is_segment_finished", "override_keys"

Take = Callable[[str, int], tuple[Any, int] | None]
"""Receives a chunk: (source, number of the chunk) → the payload and its bytes; None if it is not there yet."""


class ChunkJoin:
    """Collects the chunks that one run of a stage gets from several sources.

    1. The chunks of a source are taken in order, as they arrive, up to the one that is marked as its last
       (``meta.finished``).
    2. The chunks of one source become one payload as in a stage of vLLM-Omni that reads a single source: tensors and
       lists are appended; of other values, and of those named in ``meta.override_keys``, the last one counts.
    3. The stage gets nothing before all sources have ended.

    Args:
        sources: the stages that it reads.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self._next = dict.fromkeys(sources, 0)
        self._payloads: dict[str, dict[str, Any]] = {source: {} for source in sources}
        self._ended: set[str] = set()
        self.nbytes = 0

    def collect(self, take: Take) -> bool:
        """Take all chunks that are there, and return whether all sources have ended.

        Raises:
            TypeError: a chunk is no mapping, so that it cannot be told whether it is the last one.
        """
        for source in [one for one in self._next if one not in self._ended]:
            while source not in self._ended and (found := take(source, self._next[source])) is not None:
                chunk, nbytes = found
                if not isinstance(chunk, Mapping):
                    raise TypeError(f"chunk {self._next[source]} of stage {source} is {type(chunk).__name__}")
                self._next[source] += 1
                self.nbytes += nbytes
                self._payloads[source] = appended(self._payloads[source], chunk)
                if is_last(chunk):
                    self._ended.add(source)
        return len(self._ended) == len(self._next)

    def payloads(self) -> dict[str, dict[str, Any]]:
        """Return what each source has sent, without the marks of single chunks."""
        return {source: _without_marks(payload) for source, payload in self._payloads.items()}


def is_last(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk is the last one of its stage."""
    meta = chunk.get(META)
    return bool(meta.get(FINISHED)) if isinstance(meta, Mapping) else False


def as_last(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a payload marked as the last chunk of its stage."""
    marks = {FINISHED: torch.tensor(True), SEGMENT: torch.tensor(False)}
    return {**payload, META: {**payload.get(META, {}), **marks}}


def appended(payload: Mapping[str, Any], chunk: Mapping[str, Any]) -> dict[str, Any]:
    """Return a payload with one more chunk."""
    meta = chunk.get(META)
    named = meta.get(OVERRIDES) if isinstance(meta, Mapping) else None
    overrides = {tuple(key) if isinstance(key, list) else key for key in named or ()}
    merged = dict(payload)
    for name, value in chunk.items():
        known = merged.get(name)
        if isinstance(value, Mapping):
            inner = dict(known) if isinstance(known, Mapping) else {}
            for key, each in value.items():
                inner[key] = each if (name, key) in overrides else _joined(inner.get(key), each)
            merged[name] = inner
        elif value is not None or known is None:
            merged[name] = value if name in overrides else _joined(known, value)
    return merged


def _joined(known: Any, value: Any) -> Any:
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) and known.ndim and value.ndim:
        return torch.cat([known, value])
    if isinstance(known, list) and isinstance(value, list):
        return known + value
    return value if value is not None else known


def _without_marks(payload: dict[str, Any]) -> dict[str, Any]:
    meta = payload.get(META)
    if not isinstance(meta, Mapping):
        return payload
    kept = {key: value for key, value in meta.items() if key not in (FINISHED, SEGMENT, OVERRIDES)}
    rest = {name: value for name, value in payload.items() if name != META}
    return rest | {META: kept} if kept else rest
