"""Programs on the Python sources of a vLLM that is not installed: forked from a process that has imported it once.

Each program begins with vLLM's schedulers imported, and shares nothing else with those before it. What one prints goes
to a file of its own. The bytecode of the sources stays beside them, for the next program on the same ones.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).parents[2]
MODULES = ("vllm.v1.core.sched.scheduler", "vllm.multimodal.video")


class Ended(NamedTuple):
    exit_code: int
    output: str


def run_on_tree(
    tree: Path,
    programs: Sequence[Sequence[str]],
    folder: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] = {},
) -> list[Ended]:
    """Run programs one after the other on the package ``vllm`` of a tree.

    Args:
        programs: arguments of Python for each: ``-m`` with a module and its arguments, or ``-c`` with code.
        folder: an empty one.
        environment: what all of them get beside the environment of this process.
    """
    # Not the whole tree: it has a package `tests` as well.
    (folder / "vllm").symlink_to(tree / "vllm", target_is_directory=True)
    (folder / "programs.json").write_text(json.dumps(programs))
    settings = {
        **os.environ,
        **environment,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
    }
    command = [python, "-W", "ignore", "-m", "tests.support.tree_programs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return [Ended(code, (folder / f"output{number}").read_text()) for number, code in enumerate(codes)]


def main(name: str) -> None:
    from benchmarks.step_cost.tree import enter_tree

    folder = Path(name)
    enter_tree()
    for module in MODULES:
        import_module(module)
    codes = []
    for number, program in enumerate(json.loads((folder / "programs.json").read_text())):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become(program, folder / f"output{number}")
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(codes))


def _become(program: Sequence[str], output: Path) -> NoReturn:
    """Run a program in this process, which was forked for it, and end the process."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        kind, what, *arguments = program
        sys.argv = [what, *arguments]
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "program", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:  # noqa: BLE001  whatever it is, the test shows it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
