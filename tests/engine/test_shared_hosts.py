"""Engines on two hosts that share their encodings through a Mooncake store: each picture is encoded once.

A host is a network namespace and a folder for the store of the host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def served(hosts: list[Namespace], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Return the result of stock, and those of an engine on each host."""
    folder = tmp_path_factory.mktemp("hosts")
    case = with_models(CASES[0], models_of(CASES[:1]))
    with ExitStack() as stack:
        master = stack.enter_context(closing(Master(hosts[0], ADDRESSES[0], client_ttl=2)))
        stock = Served(folder / "stock", plan_of(folder / "alone", [case], ours=False, engines=1))
        stack.enter_context(stock.process)
        ours = []
        for number, address in enumerate(ADDRESSES):
            store = folder / f"store{number}"
            store.mkdir()
            options = {
                **case["omni_sched"],
                "encoder_share_store": {
                    "host": address,
                    "master": master.address,
                    "proto": "tcp",
                    "segment": "64MB",
                    "localbuf": "16MB",
                    "answer_seconds": 60.0,
                },
                "expert": {"encoder_share_dir": str(store), "encoder_share_wait_seconds": 60.0},
            }
            plan = plan_of(folder / "meet", [{**case, "omni_sched": options}], ours=True, engines=2)
            ours.append(Served(folder / f"host{number}", plan, hosts[number]))
            stack.enter_context(ours[-1].process)
        wait_for([stock, *ours])  # type: ignore[list-item]  # they have processes, which is all that is asked
        return stock.result()[case["name"]], [one.result()[case["name"]] for one in ours]


def test_each_picture_is_encoded_once_on_all_hosts_with_the_tokens_of_stock(served: tuple[Any, list[Any]]) -> None:
    stock, ours = served
    for one in ours:
        assert first_difference(stock["answers"], one["answers"]) is None
        assert one["left"] == []
        assert one["again"]["made"] == one["again"]["store_fetched"] == 0  # all of a second round is on the host
    counts = [one["counts"] for one in ours]
    assert sum(count["made"] for count in counts) == len(CONTENTS)
    assert sum(count["store_fetched"] for count in counts) == len(CONTENTS)  # by the host that has not made it
    assert sum(count["store_gave_up"] + count["store_unavailable"] for count in counts) == 0
