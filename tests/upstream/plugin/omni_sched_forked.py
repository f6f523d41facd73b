"""`omni_sched_forked.py FOLDER PATH ARGUMENTS…`: pytest on tests of vLLM, in a process that begins with vLLM imported.

It was forked from a process in which `tests` is that of this project; here it is vLLM's.

    FOLDER: where it runs.
    PATH: folders in which it looks for modules before others, as in PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(folder: str, path: str, arguments: Sequence[str]) -> int:
    for name in list(sys.modules):
        if name.partition(".")[0] == "tests":
            del sys.modules[name]
    os.environ["PYTHONPATH"] = path
    sys.path[:0] = path.split(os.pathsep)
    os.chdir(folder)
    _log_as_usual()
    import pytest

    return int(pytest.main([*arguments]))


def _log_as_usual() -> None:
    """Let vLLM log what it logs by default: some of its tests read that."""
    from vllm import logger

    os.environ.pop("VLLM_LOGGING_LEVEL", None)
    logger._configure_vllm_root_logger()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
