"""Run tests in several processes, which pytest forks when it has collected the tests (option ``--processes``).

The imports and the collection take 20 seconds of a processor; here they are done once, and not once in each process as
with pytest-xdist. A process takes one group of tests after the other (see `tests/support/sharing.py`) and runs its
tests in their order. Fixtures of the session survive from group to group, others do not. Groups of tests that only wait
(marked `waits`) have one more process, which leaves the processors to the others.

Sessions may take turns (option ``--turns``): they collect their tests at the same time, and a process of the next one
begins when one of this session has ended, so that no processor is idle between two sessions.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn

import pytest
from _pytest.tmpdir import TempPathFactory

from tests.support.sharing import group_of

NUMBER_BYTES = 4
PIPE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
INTERRUPTED = int(pytest.ExitCode.INTERRUPTED)
WAITS = "waits"
"""Marks tests that use a processor for a small part of their time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run the tests in N forked processes, and those marked as waiting in one more"
    parser.addoption("--processes", type=int, default=1, metavar="N", help=told)
    told = "pipes: a process begins when FROM has a byte or is closed, and writes one to TO when it has ended"
    parser.addoption("--turns", type=Turns.parse, default=None, metavar="FROM[,TO]", help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = session.config.option.processes
    if session.testsfailed or session.config.option.collectonly:
        return None
    if number < 2:
        turns: Turns | None = session.config.option.turns
        if turns is not None:
            turns.take()
        return None
    _run(session, number)
    return True


class Turns:
    """Pipes by which sessions take turns: each process that has ended lets one of the next session begin.

    Args:
        taken: descriptor from which a process reads a byte before it begins; it begins as well when nobody is left who
            could write one.
        passed: descriptor to which a byte is written for the next session; None in the last one.
    """

    def __init__(self, taken: int, passed: int | None = None) -> None:
        self._taken, self._passed = taken, passed
        for descriptor in (taken, passed):
            if descriptor is not None:
                os.set_inheritable(descriptor, False)  # else a program that outlives the session would keep it open

    @classmethod
    def parse(cls, text: str) -> Turns:
        return cls(*map(int, text.split(",")))

    def take(self) -> None:
        os.read(self._taken, 1)

    def pass_on(self) -> None:
        if self._passed is not None:
            with suppress(BrokenPipeError):  # the next session has ended already
                os.write(self._passed, b".")


class GroupQueue:
    """Holds the groups that no process has taken yet, as numbers in a pipe that all processes read.

    Args:
        groups: their numbers, in the order in which they are taken.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        numbers = b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in groups)
        if len(numbers) > PIPE_BYTES:
            raise ValueError(f"a pipe does not hold the numbers of {len(groups)} groups of tests")
        self._reader, writer = os.pipe()
        os.write(writer, numbers)
        os.close(writer)

    def take(self) -> int | None:
        """Return the number of the next group, None if all are taken."""
        taken = os.read(self._reader, NUMBER_BYTES)
        return int.from_bytes(taken, "little") if taken else None

    def clear(self) -> int:
        """Take all groups that are left, and return how many these were."""
        return sum(1 for _ in iter(self.take, None))

    def close(self) -> None:
        os.close(self._reader)


def groups_of(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the groups of tests, in the order of their first tests."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    return list(groups.values())


def only_waits(group: Iterable[pytest.Item]) -> bool:
    """Return whether all tests of a group are marked as waiting."""
    return all(item.get_closest_marker(WAITS) for item in group)


class _Child:
    """Handle of the parent for a process that runs tests.

    Args:
        queues: it takes the groups of the first one, then those that are left in the next one.
        turns: it waits for its turn to begin; None: it begins now.
    """

    def __init__(
        self,
        session: pytest.Session,
        folder: str,
        groups: Sequence[Sequence[pytest.Item]],
        queues: Sequence[GroupQueue],
        siblings: Sequence[_Child],
        turns: Turns | None,
    ) -> None:
        self.exit_code: int | None = None
        self.turns = turns
        self.running: tuple[str, Any] | None = None
        """Id and location of the test that it runs now."""
        self.connection, told = Pipe(duplex=False)
        self.connected = True
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for one in (self, *siblings):
                one.connection.close()  # a process ends with the error "broken pipe" when its parent is gone
            _become(session, folder, groups, queues, told, turns)
        told.close()
        self.ended = os.pidfd_open(self.pid)

    def sources(self) -> list[Any]:
        """Return what becomes readable when it has reported something, or has ended."""
        return [self.ended, self.connection] if self.connected else [self.ended]

    def received(self) -> Iterator[tuple[Any, ...]]:
        """Yield what it has reported. Sets `exit_code` if it has ended, and yields its last words then."""
        if self.exit_code is None and select.select([self.ended], [], [], 0)[0]:
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        try:
            while self.connected and self.connection.poll():
                yield self.connection.recv()
        except (EOFError, OSError):
            self.connected = False

    def interrupt(self) -> None:
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGINT)

    def close(self) -> None:
        if self.exit_code is None:
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.ended)
        self.connection.close()


def _run(session: pytest.Session, number: int) -> None:
    """Run all tests of the session in a number of processes, and report the results in this one."""
    terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.showfspath = False  # results of several files come in turn
    base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    groups = sorted(groups_of(session.items), key=only_waits)
    working = sum(not only_waits(group) for group in groups)
    queues = [GroupQueue(range(working)), GroupQueue(range(working, len(groups)))]
    turns: Turns | None = session.config.option.turns
    takes: list[tuple[list[GroupQueue], Turns | None]] = [(queues, turns)] * min(number, len(groups))
    if 0 < working < len(groups):
        takes.append((queues[1:], None))
    children: list[_Child] = []
    try:
        for one, (of_these, its_turns) in enumerate(takes):
            children.append(_Child(session, str(base / f"process{one}"), groups, of_these, children, its_turns))
        _report(session, children)
        if left := sum(queue.clear() for queue in queues):
            raise session.Interrupted(f"every process has died; groups of tests that did not run: {left}")
    except BaseException:
        for queue in queues:
            queue.clear()
        for child in children:
            child.interrupt()
        raise
    finally:
        for child in children:
            child.close()
        for queue in queues:
            queue.close()


def _report(session: pytest.Session, children: Sequence[_Child]) -> None:
    """Pass on what the processes report until the last one has ended."""
    while running := [child for child in children if child.exit_code is None]:
        wait([source for child in running for source in child.sources()])
        for child in running:
            for message in child.received():
                _pass_on(session, child, *message)
            if child.exit_code is not None and child.turns is not None:
                child.turns.pass_on()
            if child.exit_code and child.running is not None:
                session.config.hook.pytest_runtest_logreport(report=_crashed(child, *child.running))
            elif child.exit_code:
                raise session.Interrupted(f"a process ended with exit code {child.exit_code} while it ran no test")
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)


def _pass_on(session: pytest.Session, child: _Child, kind: str, *what: Any) -> None:
    """Call the hook of pytest that a process has reported."""
    config = session.config
    if kind == "report":
        report = config.hook.pytest_report_from_serializable(config=config, data=what[0])
        config.hook.pytest_runtest_logreport(report=report)
        return
    nodeid, location = what
    child.running = (nodeid, location) if kind == "start" else None
    hook = config.hook.pytest_runtest_logstart if kind == "start" else config.hook.pytest_runtest_logfinish
    hook(nodeid=nodeid, location=location)


def _crashed(child: _Child, nodeid: str, location: Any) -> pytest.TestReport:
    """Return the report of a test whose process has ended in the middle of it."""
    code = child.exit_code or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    message = f"the process of this test ended with {how}; the tests after it in its group did not run"
    return pytest.TestReport(nodeid, location, {}, "failed", message, "call")


class _Reporter:
    """Plugin of a process that reports its tests to its parent, in place of a terminal."""

    def __init__(self, session: pytest.Session, told: Connection) -> None:
        self._session = session
        self._config = session.config
        self._told = told

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._told.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._session.shouldfail:  # it ends its fixtures now, and the parent, once told, interrupts all processes
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._told.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._told.send(("finish", nodeid, location))


def _become(
    session: pytest.Session,
    folder: str,
    groups: Sequence[Sequence[pytest.Item]],
    queues: Sequence[GroupQueue],
    told: Connection,
    turns: Turns | None,
) -> NoReturn:
    """Run groups of tests until none is left, in a process that was just forked, and end the process."""
    code = 1
    try:
        try:
            signal.signal(signal.SIGINT, _interrupt_once)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)  # it ends when its parent is killed
            _leave_parent(session.config, folder)
            session.config.pluginmanager.register(_Reporter(session, told))
            if turns is not None:
                turns.take()
            _run_groups(session, groups, queues)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # fixtures of the session end undisturbed
            code = 0
        except KeyboardInterrupt:
            code = INTERRUPTED
        session._setupstate.teardown_exact(None)
    except BaseException:  # noqa: BLE001 - told on stderr and by the exit code
        code = 1
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(code)


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGINT: both a terminal and the parent send it, and the second one must not interrupt the clean-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave_parent(config: pytest.Config, folder: str) -> None:
    """Give a forked process its own folder for temporary files and its own captured output, and no terminal."""
    config.option.basetemp = folder
    config._tmp_path_factory = TempPathFactory.from_config(config, _ispytest=True)  # type: ignore[attr-defined]
    config.pluginmanager.unregister(name="terminalreporter")
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()


class _BetweenGroups(pytest.Item):
    """Stands for the test that follows a group: it shares the fixtures of the session with it, and no others."""

    def runtest(self) -> NoReturn:
        raise NotImplementedError("it is never run")


def _run_groups(session: pytest.Session, groups: Sequence[Sequence[pytest.Item]], queues: Iterable[GroupQueue]) -> None:
    between = _BetweenGroups.from_parent(session, name="between two groups")
    for number in chain.from_iterable(iter(queue.take, None) for queue in queues):
        for item, following in pairwise([*groups[number], between]):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                return
