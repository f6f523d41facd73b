"""Engines on two hosts that share their encodings through a Mooncake store: each picture is encoded once.

A host is a network namespace and a folder for the store of the host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dev.child_process import ChildProcess
from tests.engine.combinations.sides import models_of, with_models
from tests.engine.harness.compare import first_difference
from tests.engine.harness.processes import ENVIRONMENT, IN_PROCESS, NO_PLUGIN, OUR_PLUGIN, wait_for
from tests.engine.shared_engines import plan_of
from tests.engine.test_shared_encodings import CASES, CONTENTS
from tests.support.environments import FIRST_ENVIRONMENT
from tests.support.mooncake import Master, why_not
from tests.support.namespaces import Namespace

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not FIRST_ENVIRONMENT, reason="Mooncake is in .venv alone"),
]
ADDRESSES = ("10.0.0.1", "10.0.0.2")


class Served:
    """A process on a host that serves a case."""

    def __init__(self, folder: Path, plan: dict[str, Any], host: Namespace | None = None) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, "-m", "tests.engine.shared_engines", str(folder / "plan.json")]
        environment = {**ENVIRONMENT, **IN_PROCESS, **(OUR_PLUGIN if plan["ours"] else NO_PLUGIN)}
        with ExitStack() as stack:
            if host is not None:
                stack.enter_context(host.inside())
            self.process = ChildProcess([*command, str(folder / "result.json")], log=folder / "log", env=environment)

    def result(self) -> dict[str, Any]:
        if self.process.exit_code != 0:
            pytest.fail("\n".join(self.process.last_lines(40)))
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Namespace]]:
    if reason := why_not():
        pytest.skip(reason)
    with closing(Namespace()) as one, closing(Namespace()) as other:
        one.link(other, *ADDRESSES)
        yield [one, other]


class Results(NamedTuple):
    """Results of stock, of an engine on each host, and of one whose master is not there."""

    stock: dict[str, Any]
    hosts: list[dict[str, Any]]
    alone: dict[str, Any]


@pytest.fixture(scope="module")
def served(hosts: list[Namespace], tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("hosts")
    case = with_models(CASES[0], models_of(CASES[:1]))

    def on_host(name: str, number: int, master: str, **how: Any) -> Served:
        """Serve on a host, with the store of a host and the part of the store between hosts."""
        store = folder / f"{name}-store"
        store.mkdir()
        options = {
            **case["omni_sched"],
            "encoder_share_store": {
                "host": ADDRESSES[number],
                "master": master,
                "proto": "tcp",
                "connect_timeout_seconds": 1.0,
                "segment": "64MB",
                "localbuf": "16MB",
                "answer_seconds": 60.0,
            },
            "expert": {"encoder_share_dir": str(store), "encoder_share_wait_seconds": 60.0},
        }
        plan = plan_of(folder / f"{how['engines']}", [{**case, "omni_sched": options}], ours=True, **how)
        return Served(folder / name, plan, hosts[number])

    with ExitStack() as stack:
        master = stack.enter_context(closing(Master(hosts[0], ADDRESSES[0], client_ttl=2)))
        stock = Served(folder / "stock", plan_of(folder / "alone", [case], ours=False, engines=1))
        ours = [on_host(f"host{number}", number, master.address, engines=2) for number in range(2)]
        alone = on_host("without-master", 1, f"{ADDRESSES[0]}:1", engines=1, connects=False)
        processes = [stock, *ours, alone]
        for one in processes:
            stack.enter_context(one.process)
        wait_for(processes)  # type: ignore[arg-type]  # they have processes, which is all that is asked
        results = [one.result()[case["name"]] for one in processes]
        return Results(results[0], results[1:3], results[3])


def test_each_picture_is_encoded_once_on_all_hosts_with_the_tokens_of_stock(served: Results) -> None:
    for one in served.hosts:
        assert first_difference(served.stock["answers"], one["answers"]) is None
        assert one["left"] == []
        assert one["again"]["made"] == one["again"]["store_fetched"] == 0  # all of a second round is on the host
    counts = [one["counts"] for one in served.hosts]
    assert sum(count["made"] for count in counts) == len(CONTENTS)
    assert sum(count["store_fetched"] for count in counts) == len(CONTENTS)  # by the host that has not made it
    assert sum(count["store_gave_up"] + count["store_unavailable"] for count in counts) == 0


def test_without_a_master_every_request_is_served_and_its_pictures_are_counted(served: Results) -> None:
    assert first_difference(served.stock["answers"], served.alone["answers"]) is None
    counts = served.alone["counts"]
    assert counts["made"] == counts["store_unavailable"] == len(CONTENTS)
