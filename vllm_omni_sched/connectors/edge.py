"""Edges between stages, and the names of messages on them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Edge(NamedTuple):
    """A connection from one stage to another, by the names that vLLM-Omni gives them."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


def name_of(edge: Edge, key: str) -> bytes:
    """Return edge and key as one name, unique because every part is preceded by its length."""
    return _prefix(edge) + key.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=1024)
def _prefix(edge: Edge) -> bytes:
    parts = [part.encode("utf-8", "surrogatepass") for part in edge]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
