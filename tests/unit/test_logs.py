"""Loggers: all of ours are under vLLM's, so that its handler, its level and its file apply to them."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from vllm_omni_sched.logs import LOGGER, get_logger, logger_name

pytestmark = pytest.mark.once  # it reads the sources of this package alone

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_omni_sched"


def test_a_module_has_a_logger_under_vllm_s():
    assert logger_name("vllm_omni_sched") == LOGGER == "vllm.omni_sched"
    assert logger_name("vllm_omni_sched.connectors.arena.storage") == "vllm.omni_sched.connectors.arena.storage"
    assert get_logger("vllm_omni_sched.plugin") is logging.getLogger("vllm.omni_sched.plugin")


def test_another_name_is_a_mistake():
    with pytest.raises(ValueError, match="vllm_omni_schedule"):
        logger_name("vllm_omni_schedule.plugin")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_names_its_logger_itself(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or path.name == "logs.py":
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        assert called != "getLogger", "use vllm_omni_sched.logs.get_logger"
        if called == "init_logger":
            assert ast.unparse(node) == "init_logger(logger_name(__name__))"
        if called == "get_logger":
            assert ast.unparse(node) == "get_logger(__name__)"
