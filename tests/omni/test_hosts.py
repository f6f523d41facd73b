"""Stages on several hosts, started as operators start them; hosts are namespaces, and payloads cross them by Mooncake.

The front end and the first stage are on one host. A replica of the second stage is on each of two others, of which one
is the standby of the other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dev.omni_cpu.asking import Ask
from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import TEXT_TO_TEXT, Mode, PipelineSpec
from tests.engine.harness.processes import ROOT, write_model
from tests.omni.conftest import Ran
from tests.omni.connectors import CONNECTORS
from tests.omni.harness.hosts import Hosts
from tests.omni.harness.scenarios import ASKS
from tests.support import hosts as namespaces
from tests.support.hosts import Host
from tests.support.mooncake import why_not
from tests.support.processes import Process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.omni,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not()),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

LOGGING = CONNECTORS[0]  # over which `test_pipelines.py` runs the same pipeline on one host
STANDBY = f"{namespaces.PREFIX}.3"
PAGE_SECONDS = 2.0  # after which the page of metrics, which is written once a second, counts all that has ended
MANY = 8  # of each of `ASKS`
TIMEOUT_SECONDS = 1.5  # without a heartbeat; there is one every quarter of a second
OPTIONS = {
    "graph": {"merging": {"enabled": False}},  # what is asked is asked many times
    "runtime": {"hosts": {"standby": [STANDBY]}, "recovery": {"max_redispatches": 9}},
}


class Cluster:
    """The pipeline, its hosts, and the programs of their stages."""

    def __init__(self, hosts: Hosts, mode: Mode) -> None:
        self.hosts, self.mode = hosts, mode
        self.second, self.standby = hosts.network.host(), hosts.network.host()
        self.stages: dict[str, Process] = {}
        self._asked = 0
        hosts.start_front_end()
        self.start(self.second)
        self.start(self.standby)
        hosts.wait_for_front_end()
        self.wait_for(self.second, self.standby)

    def start(self, host: Host) -> None:
        self.stages[host.address] = self.hosts.start_stage(host)

    def serving(self) -> list[str]:
        """Return the hosts whose replicas of the second stage serve."""
        return sorted(self.hosts.front_end.replicas()[1].values())

    def wait_for(self, *hosts: Host) -> None:
        """Wait until the replicas of these hosts serve."""
        self.hosts.until(lambda: {host.address for host in hosts} <= set(self.serving()))

    def number(self, host: Host) -> int:
        """Return the number of the replica of a host."""
        found = self.hosts.front_end.replicas()[1]
        return next(number for number, address in found.items() if address == host.address)

    def begin(self) -> str:
        """Ask many at a time; `check` compares the answers."""
        self._asked += 1
        asks: dict[str, Ask] = {f"{name} {number}": ask for number in range(MANY) for name, ask in ASKS.items()}
        self.hosts.front_end.ask(f"many{self._asked}", asks)
        return f"many{self._asked}"

    def check(self, ran: Ran, name: str) -> None:
        """Compare the answers with those of one host; each request was answered once, in each of its stages."""
        answers = self.hosts.answers_of(name)
        alone = ran.answers(TEXT_TO_TEXT, self.mode, LOGGING, "together")
        assert len(answers) == MANY * len(ASKS)
        wanted = {one: alone[one.rpartition(" ")[0]] for one in answers}
        assert first_difference(wanted, {one: {"text": got["text"]} for one, got in answers.items()}) is None
        assert {tuple(sorted(got["ends"].items())) for got in answers.values()} == {(("0", 1), ("1", 1))}
        assert self.hosts.until(lambda: not self.hosts.front_end.left()) >= 0

    def until_it_runs(self, host: Host) -> None:
        """Wait until a host is in the middle of its work."""
        number = self.number(host)
        self.hosts.until(lambda: self.hosts.front_end.running(1).get(number, 0) > 1)

    def stop(self, host: Host) -> None:
        """End the stage of a host as an operator does (SIGTERM), and wait until it is gone."""
        program = self.stages[host.address]
        os.kill(program.pid, signal.SIGTERM)
        program.wait()
        host.kill()

    def restart_what_is_missing(self) -> None:
        for host in (self.second, self.standby):
            if host.address not in self.serving():
                host.kill()
                self.start(host)
                self.wait_for(host)

    def all_from(self, number: int, ran: Ran) -> float:
        """Ask many, and return how many of them this replica has finished; all of them, or it fails."""
        time.sleep(PAGE_SECONDS)
        before = self.finished(number)
        self.check(ran, self.begin())
        self.hosts.until(lambda: self.finished(number) >= before + MANY * len(ASKS))
        return self.finished(number) - before

    def incidents(self, kind: str) -> float:
        """Return how many incidents of a kind the second stage has had."""
        return self.hosts.total("incidents_total", stage="1", kind=kind)

    def finished(self, replica: int) -> float:
        """Return how many requests a replica of the second stage has finished."""
        return self.hosts.total("requests_total", stage="1", replica=str(replica), outcome="finished")


def running(mode: Mode, folder: Path, standby: bool = True) -> Iterator[Cluster]:
    options = OPTIONS if standby else OPTIONS | {"runtime": {"recovery": {"max_redispatches": 9}}}
    spec = PipelineSpec(TEXT_TO_TEXT, mode, scheduling=options)
    model = write_model("llama", ROOT / ".models" / "llama")
    with Hosts(spec, model, folder, mooncake=True, omni_heartbeat_timeout=TIMEOUT_SECONDS) as hosts:
        try:
            yield Cluster(hosts, mode)
        finally:
            print(hosts.logs())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from running("full_payload", tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same without a standby, and with stages that exchange chunks."""
    yield from running("async_chunk", tmp_path_factory.mktemp("hosts"), standby=False)


def test_several_hosts_answer_as_one_and_the_standby_takes_over(ran: Ran, cluster: Cluster) -> None:
    first, standby = cluster.number(cluster.second), cluster.number(cluster.standby)
    cluster.check(ran, cluster.begin())
    cluster.hosts.until(lambda: cluster.finished(first) == MANY * len(ASKS))
    assert cluster.finished(standby) == 0

    name = cluster.begin()
    cluster.until_it_runs(cluster.second)
    cluster.second.kill()
    cluster.check(ran, name)
    assert cluster.serving() == [STANDBY]
    cluster.check(ran, cluster.begin())
    cluster.hosts.until(lambda: cluster.finished(standby) > MANY * len(ASKS))
    assert cluster.incidents("died") == 1


@pytest.mark.long
def test_a_host_that_was_started_again_is_used_again_in_place_of_the_standby(ran: Ran, cluster: Cluster) -> None:
    cluster.restart_what_is_missing()
    assert cluster.all_from(cluster.number(cluster.second), ran) == MANY * len(ASKS)


@pytest.mark.long
@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_a_host_that_falls_silent_is_replaced_and_used_again(ran: Ran, cluster: Cluster, how: str) -> None:
    cluster.restart_what_is_missing()
    host, died = cluster.second, cluster.incidents("died")
    end = {"cut": host.mend, "freeze": host.thaw}[how]
    number, name = cluster.number(host), cluster.begin()
    cluster.until_it_runs(host)
    getattr(host, how)()
    cluster.check(ran, name)
    assert cluster.serving() == [STANDBY]
    end()
    cluster.wait_for(host)
    assert cluster.number(host) == number  # the process that was silent serves again
    done = cluster.all_from(number, ran)
    assert done == MANY * len(ASKS)
    assert cluster.incidents("died") == died + 1


@pytest.mark.long
def test_hosts_are_restarted_one_after_the_other_without_a_lost_request(ran: Ran, cluster: Cluster) -> None:
    cluster.restart_what_is_missing()
    for host in (cluster.second, cluster.standby):
        name = cluster.begin()
        cluster.until_it_runs(cluster.second)
        cluster.stop(host)
        cluster.start(host)
        cluster.wait_for(host)
        cluster.check(ran, name)
    cluster.check(ran, cluster.begin())


@pytest.mark.long
def test_the_stage_of_the_front_end_is_started_again_there(ran: Ran, cluster: Cluster) -> None:
    cluster.restart_what_is_missing()
    name = cluster.begin()
    cluster.until_it_runs(cluster.second)
    first = cluster.hosts.first
    engines = [pid for pid in first.pids() if "StageEngineCoreProc_stage0" in title_of(pid)]
    assert engines
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    cluster.check(ran, name)
    cluster.check(ran, cluster.begin())
    assert cluster.hosts.total("restarts_total", stage="0") == 1


def title_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.long
def test_two_hosts_share_the_work_in_chunks_and_one_dies(ran: Ran, chunks: Cluster) -> None:
    both = [chunks.number(host) for host in (chunks.second, chunks.standby)]
    chunks.check(ran, chunks.begin())
    chunks.hosts.until(lambda: sum(map(chunks.finished, both)) == MANY * len(ASKS))
    assert min(map(chunks.finished, both)) > 0
    name = chunks.begin()
    chunks.until_it_runs(chunks.standby)
    chunks.standby.kill()
    chunks.check(ran, name)
    assert chunks.serving() == [chunks.second.address]
    assert chunks.incidents("died") == 1
