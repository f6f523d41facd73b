"""The connectors that the pipelines are run over. A new one gets its tests by a line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Connector(NamedTuple):
    """A connector by the name in vLLM-Omni's factory, and the `extra` it is given; `folder` is that of the run."""

    name: str
    extra: Callable[[Path], dict[str, Any]] = lambda folder: {}


# vLLM-Omni's own: what it answers over this one is right
REFERENCE = Connector("SharedMemoryConnector")

# one whose link tests cut
CUT = Connector("CutConnector", lambda folder: {"cut": str(folder / "cut")})

SMALL = {"initial_bytes": 1 << 20, "max_bytes": 64 << 20}
ARENA = {"text": SMALL, "image": SMALL, "audio": SMALL}

CONNECTORS = [
    Connector("LoggingConnector", lambda folder: {"log": str(folder / "connector.log")}),
    Connector("ArenaConnector", lambda folder: ARENA),
    Connector("OmniAutoConnector", lambda folder: {"arena": ARENA}),
]
