"""Debian packages that the tests need, unpacked into a virtual environment. No root needed; standard library only.

Mooncake's transfer engine links against libibverbs, and a test of the Grafana dashboard asks a real Prometheus. Where
the system has them, nothing is done. Where it does not, `apt-get` downloads their packages with package lists of its
own, and `dpkg-deb` unpacks them into `<environment>/debian`; the system itself is left as it is.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MOONCAKE = "mooncake_transfer_engine_non_cuda"
"""Distribution whose libraries look for theirs in a folder named after it (their RPATH)."""


class SystemPackageError(Exception):
    """A package could not be fetched; the message names the packages and the reason."""


@dataclass(frozen=True)
class SystemPackage:
    """Describe a Debian package that the tests need.

    ``provided``: whether the system or the environment in the given folder provides it already.
    """

    name: str
    purpose: str
    provided: Callable[[Path], bool]


def _library(soname: str) -> Callable[[Path], bool]:
    def provided(environment: Path) -> bool:
        if any(folder.joinpath(soname).exists() for folder in _library_folders(environment)):
            return True
        try:
            ctypes.CDLL(soname)
        except OSError:
            return False
        return True

    return provided


def _command(name: str) -> Callable[[Path], bool]:
    def provided(environment: Path) -> bool:
        path = os.pathsep.join([str(environment / "bin"), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        return shutil.which(name, path=path) is not None

    return provided


PACKAGES = (
    SystemPackage("libibverbs1", "the Mooncake connector", _library("libibverbs.so.1")),
    SystemPackage("libnuma1", "the Mooncake connector", _library("libnuma.so.1")),
    SystemPackage("libcurl4", "the Mooncake connector", _library("libcurl.so.4")),
    SystemPackage("prometheus", "the dashboard", _command("prometheus")),
    SystemPackage("iproute2", "network namespaces", _command("ip")),
)


def missing(environment: Path) -> list[SystemPackage]:
    """Return the packages that neither the system nor the environment provides."""
    return [package for package in PACKAGES if not package.provided(environment)]


def advice(packages: Iterable[SystemPackage]) -> str:
    """Return what to install, for somebody who has only this line."""
    wanted = list(packages)
    purposes = sorted({package.purpose for package in wanted})
    return f"install {' '.join(package.name for package in wanted)} (for tests of {', '.join(purposes)})"


def fetch(environment: Path) -> list[str]:
    """Provide the missing packages and what they depend on; return the names of the missing ones.

    Raises:
        SystemPackageError: there is no `apt-get`, or a package cannot be downloaded or unpacked.
    """
    wanted = missing(environment)
    if not wanted:
        return []
    names = [package.name for package in wanted]
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise SystemPackageError(f"no apt-get on this system to fetch {', '.join(names)} with")
    with tempfile.TemporaryDirectory() as scratch:
        for archive in _download(names, Path(scratch)):
            _call(["dpkg-deb", "--extract", str(archive), str(environment / "debian")])
    _make_findable(environment)
    if still := missing(environment):
        raise SystemPackageError(f"{', '.join(package.name for package in still)} did not provide what the tests need")
    return names


def _download(names: list[str], folder: Path) -> list[Path]:
    """Download packages with all that the system lacks of their dependencies; return the archives."""
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    apt = ["apt-get", "--quiet", "-o", f"Dir::State={folder / 'state'}", "-o", f"Dir::Cache={folder / 'cache'}"]
    apt += ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "Debug::NoLocking=1"]
    if os.geteuid() == 0:
        apt += ["-o", "APT::Sandbox::User=root"]  # the folder belongs to nobody else
    _call([*apt, "update"])
    _call([*apt, "install", "--download-only", "--no-install-recommends", "--yes", *names])
    return sorted((folder / "cache" / "archives").glob("*.deb"))


def _make_findable(environment: Path) -> None:
    """Put libraries where Mooncake's look for them, and commands where the environment's are."""
    unpacked = environment / "debian"
    libraries = [file for file in unpacked.glob("usr/lib/*/lib*.so.*") if file.is_file()]
    libraries += [file for file in unpacked.glob("lib/*/lib*.so.*") if file.is_file()]
    for folder in _library_folders(environment):
        for library in libraries:
            _link(folder / library.name, library)
    for command in [
        *unpacked.glob("usr/bin/prometheus"),
        *unpacked.glob("usr/bin/promtool"),
        *unpacked.glob("*bin/ip"),
    ]:
        _link(environment / "bin" / command.name, command)


def _library_folders(environment: Path) -> list[Path]:
    return list(environment.glob(f"lib/python3.*/site-packages/{MOONCAKE}.libs"))


def _link(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))


def _call(command: list[str]) -> None:
    done = subprocess.run(
        command, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise SystemPackageError(f"{command[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}")
