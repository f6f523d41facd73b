"""Write a model folder once: whole or not at all, again only when its recipe has changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STAMP = ".recipe"


def write_once(
    out: Path, write: Callable[[Path], None], *, sources: Sequence[str], sizes: Mapping[str, object]
) -> Path:
    """Fill `out` with `write(folder)` unless it already holds what these `sources` make of these `sizes`.

    The files are written beside `out` and moved there in one step, so an interrupted or a concurrent writer never
    leaves half a model behind.
    """
    out = Path(out).absolute()
    ingredients = [Path(source).read_bytes() for source in sources]
    recipe = hashlib.sha256(b"".join([*ingredients, json.dumps(dict(sizes), sort_keys=True).encode()])).hexdigest()
    if _recipe_of(out) == recipe:
        return out
    if out.exists() and _recipe_of(out) is None:
        raise FileExistsError(
            f"{out} exists and was not written by dev.tiny_models: remove it or choose another folder"
        )

    draft = out.with_name(f"{out.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write(draft)
        (draft / STAMP).write_text(recipe + "\n")
        _move_into_place(draft, out, recipe)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def _recipe_of(folder: Path) -> str | None:
    try:
        return (folder / STAMP).read_text().strip()
    except OSError:
        return None


def _move_into_place(draft: Path, out: Path, recipe: str) -> None:
    if _recipe_of(out) == recipe:  # another process was quicker, and its engines may be reading the files
        return
    shutil.rmtree(out, ignore_errors=True)
    try:
        draft.rename(out)
    except OSError:
        if _recipe_of(out) != recipe:  # else another process was quicker, with the same result
            raise
