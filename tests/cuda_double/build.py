"""Compile the CUDA double into an environment: `.venv-cuda/bin/python -m tests.cuda_double.build`.

torch for CUDA looks for NVIDIA's libraries in folders beside its own. Each library that it needs is put there: the
runtime, the driver, the video decoder and NVML from ``native``; of all others, one function for every symbol that torch
imports, which refuses. Needs a C compiler, `nm` and `readelf`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
RUNTIME, DRIVER, NVML = "libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"
CUVID, NVENC = "libnvcuvid.so.1", "libnvidia-encode.so.1"
SOURCES = {
    RUNTIME: ("devices.c", "memory.c", "contexts.c", "streams.c"),
    DRIVER: ("driver.c", "green.c"),
    NVML: ("nvml.c",),
    CUVID: ("nvcuvid.c",),
    NVENC: ("nvenc.c",),
}
REFUSALS = {RUNTIME: 801, DRIVER: 801}  # cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED
OTHER_REFUSAL = 15  # CUBLAS_STATUS_NOT_SUPPORTED; an error in all other libraries
OURS = re.compile(r"lib(cu[a-zA-Z]+|nvrtc|nvshmem_host|nvJitLink|nvToolsExt|nccl)\.so\.\d+$")
OWNERS = {"nccl": "libnccl.so", "cusparseLt": "libcusparseLt.so", "cuFile": "libcufile.so", "nvshmem": "libnvshmem_"}
"""Libraries of symbols without a version, by prefix; those of no prefix are of the driver."""
FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]


def folder() -> Path:
    """Return where the libraries of this environment are."""
    return Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "lib"


def is_current() -> bool:
    """Return whether the double of this environment was built from the sources as they are."""
    stamp = folder() / "built-from.txt"
    return stamp.is_file() and stamp.read_text() == _digest()


def build() -> None:
    """Compile all libraries that torch and PyNvVideoCodec of this environment need."""
    packages = Path(sysconfig.get_path("purelib"))
    binaries = sorted([*(packages / "torch" / "lib").glob("*.so"), *(packages / "PyNvVideoCodec").glob("*_130.*.so")])
    needed, symbols = _imports(binaries)
    folder().mkdir(parents=True, exist_ok=True)
    for name in sorted({*needed, *SOURCES}):
        _compile(name, symbols[name])
    (folder() / "built-from.txt").write_text(_digest())


def _digest() -> str:
    files = [Path(__file__), *sorted(NATIVE.iterdir())]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _imports(binaries: Iterable[Path]) -> tuple[set[str], dict[str, set[tuple[str, str]]]]:
    """Return the libraries of NVIDIA that binaries need, and for each the symbols with their versions."""
    needed: set[str] = set()
    found: set[tuple[str, str]] = set()
    for binary in binaries:
        dynamic = _run("readelf", "-dW", binary)
        libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
        needed |= {name for name in libraries if OURS.match(name)}
        for line in _run("nm", "-D", "--undefined-only", binary).splitlines():
            name, _, version = line.split()[-1].partition("@")
            found.add((name, version.lstrip("@")))
    symbols: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for name, version in found:
        library = _library_of(name, version, needed)
        if library is not None:
            symbols[library].add((name, version))
    return needed, symbols


def _library_of(name: str, version: str, needed: set[str]) -> str | None:
    if version in needed:
        return version
    if version and version != "NVSHMEM":
        return None
    for prefix, library in OWNERS.items():
        if name.startswith(prefix):
            return next((one for one in needed if one.startswith(library)), None)
    return DRIVER if re.match(r"cu[A-Z]", name) else None


def _compile(name: str, symbols: set[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        sources: list[Path] = [NATIVE / source for source in SOURCES.get(name, ())]
        own = {symbol for source in sources for symbol in re.findall(r"^API .*?(\w+)\(", source.read_text(), re.M)}
        refused = sorted(symbol for symbol, _ in symbols if symbol not in own)
        stubs = work / "refusals.c"
        code = REFUSALS.get(name, OTHER_REFUSAL)
        lines = (
            f'__attribute__((visibility("default"))) int {symbol}(void) {{ return {code}; }}' for symbol in refused
        )
        stubs.write_text("\n".join(["typedef int nothing;", *lines, ""]))
        versions = {version for _, version in symbols if version}
        script = []
        if versions:
            (work / "versions").write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
            script = [f"-Wl,--version-script={work / 'versions'}"]
        library = work / name
        flags = [*FLAGS, "-fno-builtin", f"-Wl,-soname,{name}", "-Wl,--hash-style=gnu", *script]
        _run("cc", *flags, "-o", library, *sources, stubs, "-lpthread", "-ldl")
        target = folder() / name
        target.unlink(missing_ok=True)  # a process that has it mapped keeps the old file
        target.write_bytes(library.read_bytes())


def _run(*command: str | Path) -> str:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SystemExit(f"error: the CUDA double needs {command[0]}; install a C compiler and binutils") from error
    if done.returncode:
        raise SystemExit(f"error: {command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:] == ["--if-needed"] and is_current():
        sys.exit()
    build()
