"""Optional compiled modules of the simulator and of the policies that it runs: the same sources, compiled by mypyc.

They are loaded by the programs that simulate (`use`), never by an engine. A process has all of them or none: they
are used only if they were built from exactly the sources that are installed, for this Python, and before any of them
was imported from its source. Without them, or with ``VLLM_OMNI_SCHED_NATIVE=0``, the sources run, with the same
results.

`python -m vllm_omni_sched.sim.compiled.build` builds them beside these files, with mypyc and a C compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

VARIABLE = "VLLM_OMNI_SCHED_NATIVE"
"""Environment variable that turns the compiled modules off when it is 0."""

PACKAGE = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "built"
MANIFEST = "manifest.json"

SOURCES = ("config", "core", "graph", "monitor", "resource", "sim")
"""Folders of the package that compiled modules depend on: a change of any file in them makes the built ones stale."""


def fingerprint(package: Path = PACKAGE) -> str:
    """Return a hash of the sources, and of the Python, that compiled modules are built from and for."""
    digest = hashlib.sha256(str(sysconfig.get_config_var("EXT_SUFFIX")).encode())
    for folder in SOURCES:
        for source in sorted((package / folder).rglob("*.py")):
            digest.update(source.relative_to(package).as_posix().encode())
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


class _Finder(MetaPathFinder):
    """Finds the compiled modules, by name."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, str(file)))


def find(setting: str | None, folder: Path = FOLDER, package: Path = PACKAGE) -> tuple[dict[str, Path] | None, str]:
    """Return the files of the compiled modules by name, or None, and the reason.

    Args:
        setting: value of `VARIABLE`.
        folder: where the modules were built.
        package: the sources.
    """
    if setting == "0":
        return None, f"turned off by {VARIABLE}=0; simulations run in Python"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, f"not built (python -m {__name__}.build); simulations run in Python"
    if manifest["fingerprint"] != fingerprint(package):
        return None, f"built from other sources than these: build them again (python -m {__name__}.build)"
    files = {name: folder / file for name, file in manifest["modules"].items()}
    return files, "simulations run compiled modules"


def use(setting: str | None, folder: Path = FOLDER, package: Path = PACKAGE) -> bool:
    """Let this process import the compiled modules, if they can be used; return whether it does.

    `reason` says why, or why not. The arguments are those of `find`.
    """
    global active, reason
    if active:
        return True
    files, reason = find(setting, folder, package)
    earlier = sorted(files.keys() & sys.modules.keys()) if files is not None else []
    if earlier:
        reason = f"{earlier[0]} was imported from its source before; simulations run in Python"
    elif files is not None:
        sys.meta_path.insert(0, _Finder(files))
        active = True
    return active


def begin_worker(active: bool) -> None:
    """Begin a process that simulates for another one, before it imports anything else of this package.

    It dies silently at Ctrl-C, which all processes get.

    Args:
        active: whether the other process uses the compiled modules.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    use(os.environ.get(VARIABLE) if active else "0")


active = False
"""Whether this process imports the compiled modules."""
reason = "not asked for by this process"
"""Why `active` is so, for `vllm-omni-sched doctor`."""
