"""However processes end, nothing is left behind.

All with real processes, each killed by SIGKILL or stopped at an exact point.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.arena_faults import IN_POOL, Start
from vllm_omni_sched.connectors.arena import meeting


def test_nothing_is_left_when_all_have_closed(start: Start, root: str) -> None:
    processes = [start() for _ in range(4)]
    for process in processes:
        process.put_many(5, IN_POOL)
        process.get("m3", hold=True)
    for process in processes:
        process.close()
    assert os.listdir(root) == []


def test_nothing_is_left_by_a_process_that_ends_and_has_not_closed(root: str) -> None:
    program = f"""if True:
        import numpy
        from tests.support.arena import EDGE, small
        from vllm_omni_sched.connectors.arena import ArenaTransport
        from vllm_omni_sched.connectors.framing import make_message
        path = ArenaTransport(small({root!r}))
        path.put(make_message(EDGE, "k", numpy.ones((1, 10000))))
        held = path.get(EDGE, "k").open()
        print(held.sum())
    """
    here = Path(__file__).parents[4]
    ended = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("10000.0\n", "")
    assert os.listdir(root) == []


def test_nothing_is_left_when_all_were_killed_and_somebody_has_swept(start: Start, root: str) -> None:
    processes = [start() for _ in range(4)]
    for process in processes:
        process.put_many(5, IN_POOL)
        process.get("m3", hold=True)
    home = Path(root) / f"vllm-omni-sched-{os.geteuid()}"
    assert meeting.sweep(home) == 0
    for process in processes:
        assert home.exists()
        process.kill()
    assert meeting.sweep(home) == 1
    assert os.listdir(root) == []


def test_sweep_leaves_what_it_did_not_make(root: str) -> None:
    home = Path(root) / f"vllm-omni-sched-{os.geteuid()}"
    (home / "a" / "directory").mkdir(parents=True)
    (home / "file").touch()
    (home / "link").symlink_to("/tmp")
    assert meeting.sweep(home) == 0
    assert (home / "a" / "directory").exists()
    assert meeting.sweep(Path(root) / "nowhere") == 0
    (home / "a" / "directory").rmdir()
    (home / "link").unlink()
    (home / "file").unlink()
    assert meeting.sweep(home) == 1
