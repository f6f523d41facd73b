"""Check that what a test leaves open is an error in its own file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAKS = """
import socket

def test_leaks():
    held = [socket.socket()]
    held.append(held)

def test_ends():
    pass
"""


def test_a_socket_that_is_left_open_in_a_cycle_is_an_error_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(LEAKS)
    (tmp_path / "test_b.py").write_text("def test_later():\n    import gc\n\n    gc.collect()\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-W", "error::ResourceWarning", "-W", "error::pytest.PytestUnraisableExceptionWarning"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "3 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR at teardown of test_ends" in done.stdout, done.stdout
    assert "unclosed <socket.socket" in done.stdout
