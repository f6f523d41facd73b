"""Programs that are forked with vLLM imported are as if they had been started in the usual way."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from dev.child_process import ChildProcess
from tests.engine.harness.processes import ENVIRONMENT
from tests.support import namespaces
from tests.support.warm import WarmPopen

PROGRAM = "tests.support.warm_program"


def start(tmp_path: Path, *words: str, **environment: str) -> ChildProcess:
    command = [sys.executable, "-m", PROGRAM, *words]
    return ChildProcess(command, log=tmp_path / "log", env={**ENVIRONMENT, **environment}, start=WarmPopen)


def test_a_program_has_its_own_arguments_environment_session_and_log(tmp_path):
    with start(tmp_path, "say", "a b", VLLM_SAID="yes") as process:
        assert process.wait() == 0
    said = json.loads(process.log.read_text().splitlines()[-1])
    assert said["argv"] == ["say", "a b"]
    assert said["environment"] == "yes"
    assert said["pid"] == said["session"] == process.pid
    assert said["vllm_was_there"]
    assert not said["ours_was_there"]


def test_what_it_spawns_is_warm_too_and_has_the_environment_of_that_moment(tmp_path):
    with start(tmp_path, "spawn") as process:
        assert process.wait() == 0
    parent, child, grandchild = (json.loads(line) for line in process.log.read_text().splitlines()[-3:])
    assert parent["environment"] is None
    assert [child["environment"], grandchild["environment"]] == ["child", "grandchild"]
    assert [one["metrics_in_files"] for one in (parent, child, grandchild)] == [False, True, True]
    assert child["vllm_was_there"]
    assert grandchild["vllm_was_there"]
    assert {child["session"], grandchild["session"]} == {process.pid}


def test_it_is_in_the_network_namespace_of_the_thread_that_starts_it(tmp_path):
    try:
        network = namespaces.Namespace()
    except OSError as error:
        pytest.skip(f"no network namespace can be made here ({error.strerror}): that takes root")
    with network.inside(), start(tmp_path, "spawn") as process:
        inside = os.stat(namespaces.HERE).st_ino
        assert process.wait() == 0
    network.close()
    assert os.stat(namespaces.HERE).st_ino != inside
    said = [json.loads(line) for line in process.log.read_text().splitlines()[-3:]]
    assert [one["network"] for one in said] == [inside] * 3


def test_a_copy_that_is_made_again_takes_the_place_of_the_first(tmp_path):
    with start(tmp_path, "copy") as process:
        assert process.wait() == 0, process.last_lines(20)
    assert [json.loads(line) for line in process.last_lines(2)] == [{"copies": 1}, {"mask": 0o27}]


def test_it_looks_at_the_class_of_a_model_itself(tmp_path):
    with start(tmp_path, "look", VLLM_CACHE_ROOT=str(tmp_path / "cache")) as process:
        assert process.wait() == 0, process.last_lines(20)
    assert json.loads(process.last_lines(1)[0]) == {"generates_text": True}
    assert list((tmp_path / "cache" / "modelinfos").iterdir())  # nobody had looked before


def test_what_was_imported_stays_hidden_from_the_garbage_collector(tmp_path):
    with start(tmp_path, "unfreeze") as process:
        assert process.wait() == 0, process.last_lines(20)
    said = json.loads(process.last_lines(1)[0])
    assert said["frozen_after"] == said["frozen"] > 100_000


@pytest.mark.parametrize(("word", "code"), [("fail", 3), ("raise", 1), ("die", -9)])
def test_its_exit_code_is_told(tmp_path, word, code):
    with start(tmp_path, word) as process:
        assert process.wait() == code


def test_stopping_ends_it_and_what_it_spawned(tmp_path):
    with start(tmp_path, "stay") as process:
        while not (tmp_path / "log").read_text().count("\n"):
            assert process.exit_code is None
    pids = json.loads((tmp_path / "log").read_text().splitlines()[-1])["pids"]
    assert [pid for pid in pids if runs(pid)] == []


def runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended, though nobody has looked yet how, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
