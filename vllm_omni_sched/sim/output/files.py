"""Write files atomically."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Yield a text file that replaces ``path`` at the end, unless the block raises.

    Raises:
        OSError: the folder cannot be written to.
    """
    with temporary(path) as name, open(name, "w", encoding="utf-8") as file:
        yield file


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """Yield the name of an empty file beside ``path`` that replaces it at the end, unless the block raises.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    written = Path(name)
    try:
        yield written
        written.chmod(0o666 & ~_mask())
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


def _mask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
