"""`python -m tests.support.warm_program WORD`: a program for `tests/dev/test_warm.py`."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from typing import Any
from unittest.mock import patch

import psutil
from prometheus_client import values

from dev.fork_spawned import fork_what_is_spawned
from tests.support import namespaces

WERE_THERE = frozenset(sys.modules)


def state() -> dict[str, Any]:
    return {
        "argv": sys.argv[1:],
        "environment": os.environ.get("VLLM_SAID"),
        "network": os.stat(namespaces.HERE).st_ino,
        "metrics_in_files": values.ValueClass._multiprocess,
        "pid": os.getpid(),
        "session": os.getsid(0),
        "vllm_was_there": "vllm.v1.engine.core" in WERE_THERE,
        "ours_was_there": "vllm_omni_sched" in WERE_THERE,
    }


def _spawn(names: list[str]) -> None:
    print(json.dumps(state()), flush=True)
    if names:
        os.environ["VLLM_SAID"] = names[0]
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = "named"
        process = multiprocessing.get_context("spawn").Process(target=_spawn, args=(names[1:],))
        process.start()
        process.join()
        assert process.exitcode == 0


def _stay() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(json.dumps({"pids": [os.getpid(), child.pid]}), flush=True)
    child.join()


def _copy_again() -> None:
    """Have a copy made again once this process has another mask for files, which the new one has, too."""
    first = psutil.Process().children()
    os.umask(0o27)
    fork_what_is_spawned()
    psutil.wait_procs(first)
    print(json.dumps({"copies": len(psutil.Process().children())}), flush=True)
    process = multiprocessing.get_context("spawn").Process(target=_say_mask)
    process.start()
    process.join()
    sys.exit(process.exitcode)


def _say_mask() -> None:
    print(json.dumps({"mask": os.umask(0)}), flush=True)


def _look_at_a_model() -> None:
    """Ask vLLM about a class of models; whoever starts a process for that fails."""
    from vllm.model_executor.models.registry import ModelRegistry

    with patch("subprocess.Popen", side_effect=AssertionError("a process is started")):
        info = ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
    print(json.dumps({"generates_text": info.is_text_generation_model}))


def _end_an_engine() -> None:
    """Do to the garbage collector what vLLM does when an engine ends."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    print(json.dumps({"frozen": before, "frozen_after": gc.get_freeze_count()}))


def main(word: str) -> None:
    if word == "say":
        print(json.dumps(state()))
    elif word == "spawn":
        _spawn(["child", "grandchild"])
    elif word == "stay":
        _stay()
    elif word == "copy":
        _copy_again()
    elif word == "unfreeze":
        _end_an_engine()
    elif word == "look":
        _look_at_a_model()
    elif word == "raise":
        raise ValueError(word)
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
