"""vLLM-Omni's factory makes our connectors, whichever of both is imported first, in processes that have vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from dev.child_process import ChildProcess
from tests.engine.harness.processes import ENVIRONMENT
from tests.support.arena import place
from tests.support.warm import WarmPopen
from vllm_omni_sched.connector_names import CONNECTORS

pytestmark = pytest.mark.omni

TOOL = """
import sys
{before}
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
{after}
extra = {{"directory": {root!r}, "stage_id": 0}}
for made in ("first", "second"):
    connector = OmniConnectorFactory.create_connector(ConnectorSpec("ArenaConnector", extra))
    assert connector.put("0", "1", "k", {{"x": made}})[0]
    assert connector.get("0", "1", "k")[0] == {{"x": made}}
    connector.close()
print(sorted(set(OmniConnectorFactory.list_registered_connectors()) & {names!r}))
"""
REGISTER = "from vllm_omni_sched.plugin import register; register(); register()"
HOOKED = """
from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
assert hasattr(AsyncOmniEngine._create_orchestrator, "__omni_sched__")
"""
ORDERS = {
    "our plugin first": (REGISTER + "; assert 'vllm_omni' not in sys.modules", HOOKED),
    "our package last": ("", "import vllm_omni_sched"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_tool_makes_one_of_ours_through_the_factory(order: str, tmp_path: Path) -> None:
    before, after = ORDERS[order]
    tool = tmp_path / "tool.py"
    with place() as root:
        tool.write_text(TOOL.format(before=before, after=after, root=root, names=set(CONNECTORS)))
        with ChildProcess([str(tool)], log=tmp_path / "log", env=ENVIRONMENT, start=WarmPopen) as process:
            assert process.wait() == 0, process.last_lines(40)
    assert process.last_lines(1) == [str(sorted(CONNECTORS))]
