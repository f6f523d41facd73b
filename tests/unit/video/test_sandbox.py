"""What a decoder process cannot do any more; and the filter, as a kernel of either machine would read it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import video_actors as actors
from vllm_omni_sched.video import sandbox
from vllm_omni_sched.video.sandbox import Part, Profile, landlock, seccomp
from vllm_omni_sched.video.service import FlashCodec

ATTEMPTS = """
import ctypes, fcntl, json, os, resource, socket, struct, sys, threading
from pathlib import Path
from vllm_omni_sched.video import sandbox
secret, there = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
pair, file = socket.socketpair(), os.memfd_create("file")
said = {"missing": [part.value for part in sandbox.enter(sandbox.Profile.CPU, memory_bytes=1 << 28, file_bytes=1000)]}
def thread():
    one = threading.Thread(target=int)
    one.start()
    one.join()
def called(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
attempts = {
    "socket": lambda: socket.socket(),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "connect": lambda: pair[0].connect("/run/x"),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "fork": lambda: os.fork(),
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "signal": lambda: os.kill(os.getppid(), 0),
    "owner": lambda: fcntl.fcntl(pair[0], fcntl.F_SETOWN, os.getppid()),
    "owner's signal": lambda: fcntl.fcntl(pair[0], 10, 9),  # F_SETSIG
    "owner of a kind": lambda: fcntl.fcntl(pair[0], 15, struct.pack("=ii", 1, os.getppid())),  # F_SETOWN_EX
    "owner by ioctl": lambda: fcntl.ioctl(pair[0], 0x8901, struct.pack("=i", os.getppid())),  # FIOSETOWN
    "group by ioctl": lambda: fcntl.ioctl(pair[0], 0x8902, struct.pack("=i", os.getppid())),  # SIOCSPGRP
    "not to block": lambda: pair[0].setblocking(False),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
    "processors": lambda: os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)),
    "own processors": lambda: os.sched_getaffinity(0),
    "times": lambda: os.utime(secret, (0, 0)),
    "attribute": lambda: os.removexattr(secret, "user.none"),
    "mode": lambda: called(452, -100, secret.encode(), 0o777, 0),  # fchmodat2
    "tree": lambda: called(428, -100, b"/", 0),  # open_tree
    "write": lambda: open(there + "/new", "w"),
    "append": lambda: open(secret, "a"),
    "delete": lambda: os.unlink(secret),
    "rename": lambda: os.rename(secret, there + "/other"),
    "raise limits": lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40)),
    "read": lambda: open(secret).read(),
    "read beside code": lambda: open(sys.path[1] + "/beside").read(),
    "list beside code": lambda: os.listdir(sys.path[1]),
    "own code": lambda: open(sandbox.__file__).read(10),
    "memory": lambda: bytearray(1 << 29),
    "large file": lambda: [os.write(file, b"x" * 999), os.write(file, b"x" * 999)] and os.write(file, b"x"),
    "limits": lambda: resource.getrlimit(resource.RLIMIT_STACK),
    "code": lambda: open(os.__file__).read(10),
    "import": lambda: __import__("decimal"),
    "thread": thread,
    "memory file": lambda: os.close(os.memfd_create("packets")),
    "files": lambda: [os.dup(0) for _ in range(100)],
}
for name, attempt in attempts.items():
    try:
        attempt()
        said[name] = "done"
    except BaseException as error:
        said[name] = type(error).__name__
print(json.dumps(said))
"""


def environment(*first: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((*first, *filter(None, sys.path)))}


def test_what_a_process_cannot_do(tmp_path: Path) -> None:
    missing = sandbox.missing()
    if Part.SECCOMP in missing:
        pytest.skip("this kernel filters no system calls")
    secret = tmp_path / "secret"
    secret.write_text("text")
    on_path = tmp_path / "on path"
    on_path.mkdir()
    (on_path / "beside").write_text("text")
    run = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, secret, tmp_path],
        capture_output=True,
        text=True,
        env=environment(str(on_path)),
        timeout=60,
    )
    said = json.loads(run.stdout)
    assert said.pop("missing") == [part.value for part in missing]
    denied = "PermissionError"
    assert said == {
        **dict.fromkeys(("socket", "unix", "connect", "exec", "fork", "spawn", "signal"), denied),
        **dict.fromkeys(("owner", "owner's signal", "owner of a kind", "owner by ioctl", "group by ioctl"), denied),
        **dict.fromkeys(("priority", "processors", "times", "attribute", "mode", "tree"), denied),
        **dict.fromkeys(("write", "append", "delete", "rename"), denied),
        "raise limits": "ValueError",
        **dict.fromkeys(
            ("read", "read beside code", "list beside code"), "done" if Part.LANDLOCK in missing else denied
        ),
        "memory": "MemoryError",
        "large file": "OSError",
        "files": "OSError",
        **dict.fromkeys(
            ("limits", "code", "own code", "import", "thread", "memory file", "not to block", "own processors"), "done"
        ),
    }
    assert secret.read_text() == "text"


def test_decoders_are_in_it() -> None:
    with FlashCodec(kinds=(actors.kind(1),), read_index=actors.READ_INDEX) as codec:
        codec.load(actors.video(4), lambda _: [0])
        process = codec._dispatcher.pool.slots[0].process
        assert process is not None
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert status["NoNewPrivs"] == "1"
    if Part.SECCOMP not in sandbox.missing():
        assert status["Seccomp"] == "2"
    assert f"Max data size             {codec.options.worker_memory_bytes}" in limits
    assert b"SECRET_OF_THE_SERVER" not in environment


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "1")


def judged(machine: str, profile: Profile, number: int, *arguments: int) -> str:
    """What the filter says of a call: the interpreter of the kernel, as far as the filter goes."""
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    words = {0: number, 4: arch}
    for place, value in enumerate(arguments):
        words |= {16 + 8 * place: value & 0xFFFFFFFF, 20 + 8 * place: value >> 32}
    program = seccomp.program(profile, machine, pid=77)
    at, accumulator = 0, 0
    while True:
        code, true, false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = words.get(operand, 0)
        elif code == 0x06:
            if operand == 0x7FFF0000:
                return "allowed"
            return "killed" if operand == 0x80000000 else errno.errorcode[operand & 0xFFFF]
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: accumulator & operand != 0}[code]
            at += true if holds else false


X86, ARM, CPU, DEVICE = "x86_64", "aarch64", Profile.CPU, Profile.DEVICE
WRONLY = os.O_WRONLY | os.O_CREAT


@pytest.mark.parametrize(
    ("machine", "profile", "call", "verdict"),
    [
        (X86, CPU, (41, 2), "EPERM"),  # socket
        (ARM, CPU, (198, 2), "EPERM"),
        (X86, DEVICE, (41, 2), "EPERM"),
        (ARM, DEVICE, (198, 10), "EPERM"),
        (X86, DEVICE, (41, 1), "allowed"),  # a daemon of the driver
        (X86, CPU, (59,), "EPERM"),  # execve
        (ARM, DEVICE, (221,), "EPERM"),
        (X86, CPU, (435,), "ENOSYS"),  # clone3
        (X86, CPU, (29,), "EPERM"),  # shmget
        (ARM, CPU, (186,), "EPERM"),  # msgget
        (X86, DEVICE, (240,), "EPERM"),  # mq_open
        (ARM, DEVICE, (119,), "EPERM"),  # sched_setscheduler
        (ARM, CPU, (235,), "allowed"),  # mbind; utimes on the other machine
        (X86, DEVICE, (203,), "allowed"),  # sched_setaffinity
        (X86, CPU, (56, 0x3D0F00), "allowed"),  # clone, a thread
        (X86, CPU, (56, 17), "EPERM"),  # clone, a process
        (ARM, CPU, (220, 17), "EPERM"),
        (X86, CPU, (234, 77), "allowed"),  # tgkill, itself
        (X86, CPU, (234, 78), "EPERM"),
        (X86, DEVICE, (72, 3, 8, 78), "EPERM"),  # fcntl, F_SETOWN
        (ARM, CPU, (25, 3, 10, 9), "EPERM"),  # F_SETSIG
        (X86, CPU, (72, 3, 15 | 1 << 32), "EPERM"),  # F_SETOWN_EX, and what the kernel does not look at
        (X86, CPU, (72, 3, 1030), "allowed"),  # F_DUPFD_CLOEXEC
        (ARM, DEVICE, (29, 3, 0x8901), "EPERM"),  # ioctl, FIOSETOWN
        (X86, CPU, (16, 3, 0x541C), "EPERM"),  # TIOCLINUX
        (X86, DEVICE, (16, 3, 0xC020462A), "allowed"),  # of the driver
        (X86, CPU, (257, 0, 0, os.O_RDONLY | os.O_CLOEXEC), "allowed"),  # openat
        (X86, CPU, (257, 0, 0, WRONLY), "EPERM"),
        (ARM, CPU, (56, 0, 0, WRONLY), "EPERM"),
        (X86, CPU, (2, 0, os.O_RDWR), "EPERM"),  # open
        (X86, DEVICE, (257, 0, 0, os.O_RDWR), "allowed"),
        (X86, CPU, (302, 0, 2, 0), "allowed"),  # prlimit64, asking
        (X86, CPU, (302, 0, 2, 0x1000), "EPERM"),
        (ARM, CPU, (261, 0, 2, 1 << 32), "EPERM"),
        (X86, CPU, (0,), "allowed"),  # read
        (X86, CPU, (47,), "allowed"),  # recvmsg
        (ARM, CPU, (211,), "allowed"),  # sendmsg
        (X86, CPU, (0x40000000 + 41,), "killed"),  # socket, by another name
    ],
)
def test_verdicts(machine: str, profile: Profile, call: tuple[int, ...], verdict: str) -> None:
    assert judged(machine, profile, *call) == verdict


@pytest.mark.parametrize("machine", [X86, ARM])
@pytest.mark.parametrize("profile", list(Profile))
def test_jumps_stay_inside(machine: str, profile: Profile) -> None:
    program = seccomp.program(profile, machine, pid=77)
    for at, (_, true, false, operand) in enumerate(program):
        assert at + 1 + max(true, false) < len(program) or program[at][0] == 0x06
        assert 0 <= true < 256
        assert 0 <= false < 256
        assert 0 <= operand < 1 << 32


def test_another_machines_calls_end_the_process() -> None:
    program = seccomp.program(CPU, X86, pid=77)
    assert program[0][3] == 4  # the machine is looked at first
    assert program[1][3] == 0xC000003E
    assert program[2][3] == 0x80000000


SIGNALS = """
import os, sys
from vllm_omni_sched.video.sandbox import landlock
landlock.restrict(["/usr"])
os.kill(os.getpid(), 0)
try:
    os.kill(os.getppid(), 0)
except PermissionError:
    print("denied")
"""


@pytest.mark.skipif(landlock.version() < 6, reason="this kernel's Landlock knows no signals")
def test_landlock_keeps_signals_inside() -> None:
    run = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, env=environment(), timeout=60)
    assert run.stdout == "denied\n", run.stderr
