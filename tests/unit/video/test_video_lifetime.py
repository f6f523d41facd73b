"""Decoder processes end with their owner, however it ends; and a forked child leaves them alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.until import until

OWNER = """
import json, os, signal, sys, warnings
from tests.support import video_actors as actors
from vllm_omni_sched.config.errors import DecoderError
from vllm_omni_sched.video.service import FlashCodec
warnings.simplefilter("ignore")  # forking with threads is what this is about
codec = FlashCodec(kinds=(actors.kind(2),), read_index=actors.READ_INDEX)
decoded = codec.load(actors.video(8), lambda _: range(8))
pids = [slot.process.pid for slot in codec._dispatcher.pool.slots]
print(json.dumps(pids), flush=True)
{}
"""

ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "at its end": "",
    "with an error": "raise SystemExit(3)",
    "at once": "os._exit(0)",
}

FORK = """
child = os.fork()
if child == 0:
    del decoded
    code = 1
    try:
        codec.load(actors.video(8), lambda _: range(8))
    except DecoderError:
        code = 42
    codec.close()
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
again = codec.load(actors.video(8), lambda _: range(8))
assert (again.frames == decoded.frames).all()
assert pids == [slot.process.pid for slot in codec._dispatcher.pool.slots]
print("well", flush=True)
"""


def owner(code: str) -> tuple[list[int], str]:
    """Run an owner to its end; the pids of its decoders, and what else it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
        timeout=60,
    )
    first, _, rest = run.stdout.partition("\n")
    return json.loads(first), rest


def decodes(pid: int) -> bool:
    try:
        return b"omni_sched.video." in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("end", list(ENDS))
def test_decoders_end_with_their_owner(end: str) -> None:
    pids, _ = owner(OWNER.format(ENDS[end]))
    assert len(pids) == 2
    wait_for_end(pids)


def wait_for_end(pids: list[int]) -> None:
    until(lambda: not any(map(decodes, pids)))


def test_a_forked_child_leaves_them_alone() -> None:
    assert owner(OWNER.format(FORK))[1] == "well\n"
