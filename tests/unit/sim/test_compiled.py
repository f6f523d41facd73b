"""Compiled modules are used only if they belong to the sources, and simulate the same."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_omni_sched.sim import compiled
from vllm_omni_sched.sim.compiled import build as building

ROOT = compiled.PACKAGE.parent
KERNEL = "vllm_omni_sched.sim.kernel"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of two folders of the package: as much as a fingerprint is taken of."""
    for folder in ("graph", "resource"):
        shutil.copytree(compiled.PACKAGE / folder, tmp_path / "package" / folder)
    return tmp_path / "package"


def built(folder: Path, package: Path) -> Path:
    """Write a manifest for these sources."""
    manifest = {"fingerprint": compiled.fingerprint(package), "modules": {KERNEL: "kernel.so"}}
    folder.mkdir()
    (folder / compiled.MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_modules_that_were_not_built_are_not_used(tmp_path: Path) -> None:
    files, reason = compiled.find(None, tmp_path)
    assert files is None
    assert reason.startswith("not built (python -m vllm_omni_sched.sim.compiled.build)")


def test_the_environment_variable_turns_them_off(tmp_path: Path, package: Path) -> None:
    folder = built(tmp_path / "built", package)
    assert compiled.find("1", folder, package)[0] == {KERNEL: folder / "kernel.so"}
    files, reason = compiled.find("0", folder, package)
    assert files is None
    assert "VLLM_OMNI_SCHED_NATIVE=0" in reason


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_modules_of_other_sources_are_not_used(tmp_path: Path, package: Path, change: str) -> None:
    folder = built(tmp_path / "built", package)
    source = package / "graph" / "order.py"
    if change == "edit":
        source.write_text(source.read_text() + "\n")
    elif change == "add":
        source.with_name("another.py").touch()
    else:
        source.unlink()
    files, reason = compiled.find(None, folder, package)
    assert files is None
    assert reason.startswith("built from other sources than these")


def test_modules_that_were_imported_from_their_source_are_not_replaced(tmp_path: Path, package: Path) -> None:
    __import__(KERNEL)
    before = list(sys.meta_path)
    assert not compiled.use(None, built(tmp_path / "built", package), package)
    assert compiled.reason == f"{KERNEL} was imported from its source before; simulations run in Python"
    assert sys.meta_path == before
    assert not compiled.active


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "/no/compiler")
    with pytest.raises(building.BuildError, match=r"/no/compiler|cannot be imported"):
        building.build(tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_the_fingerprint_is_taken_of_all_that_compiled_modules_import() -> None:
    """A type or a constant of another module is built into those that import it."""
    names = {f"vllm_omni_sched.{one}" for one in building.MODULES}
    for name in names:
        assert name.split(".")[1] in compiled.SOURCES
        source = (ROOT / Path(*name.split("."))).with_suffix(".py")
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_omni_sched."):
                assert str(node.module).split(".")[1] in compiled.SOURCES, f"{name} imports {node.module}"


def classes(module: str) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return the bases of each class of a module, and where the names come from that it imports."""
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
    bases = {
        node.name: {ast.unparse(base).split("[")[0] for base in node.bases}
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return bases, {name.name: node.module or "" for node in imported for name in node.names}


def test_no_class_in_python_inherits_from_a_compiled_one() -> None:
    """mypyc refuses that when the first one is made."""
    open_bases = {"Protocol", "NamedTuple", "Enum", "Exception"}
    names = {f"vllm_omni_sched.{one}" for one in building.MODULES}
    native = {
        (module, name) for module in names for name, bases in classes(module)[0].items() if not bases & open_bases
    }
    for source in compiled.PACKAGE.rglob("*.py"):
        module = ".".join(source.relative_to(ROOT).with_suffix("").parts)
        if module in names or source.name.startswith("__"):
            continue
        bases, imported = classes(module)
        for name, parents in bases.items():
            for parent in parents:
                assert (imported.get(parent), parent) not in native, f"{module}.{name}({parent}): compile both"


SIMULATE = """
import os, sys
from pathlib import Path
from vllm_omni_sched.sim import compiled
is_compiled = compiled.use(os.environ.get(compiled.VARIABLE), Path(sys.argv[1]))
from benchmarks.sim_scale.cases import _OPTIONS, _SCENARIO, _STAGE
from vllm_omni_sched.sim import kernel, run
from vllm_omni_sched.sim.scenario.loader import load
assert kernel.__file__.endswith(".py") != is_compiled
for variant in ("stock", "ours", "gated"):
    sizes = dict(seed=1, seconds=4.0, rate=24.0, nodes=1, gpus=4, options=_OPTIONS[variant])
    text = _SCENARIO.format(**sizes).replace("drain_seconds = 0.0", "") + _STAGE[variant]
    Path("scenario.toml").write_text(text)
    result = run.simulate(load(Path("scenario.toml")))
    print(result.summary(), result.timeline, result.records)
print(compiled.reason, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.skipif(shutil.which("gcc") is None or find_spec("mypyc") is None, reason="no C compiler, or no mypyc")
def test_compiled_modules_simulate_the_same(tmp_path: Path) -> None:
    folder = building.build(tmp_path / "built", level="0")  # the C compiler takes a minute for more

    def run(**environment: str) -> tuple[str, str]:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), compiled.VARIABLE: "1", **environment}
        command = [sys.executable, "-c", SIMULATE, str(folder)]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr.strip()

    found, reason = run()
    assert reason == "simulations run compiled modules"
    expected, reason = run(**{compiled.VARIABLE: "0"})
    assert "turned off" in reason
    assert found == expected
