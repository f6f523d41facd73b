"""What a writer of a Mooncake store does at its end."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_omni_sched.config.errors import RendezvousError, TransportClosedError
from vllm_omni_sched.connectors.mooncake.writer import Writer


class ClosedStore:
    """A store whose calls all end with one error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def config(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace()

    def remove(self, keys: list[str]) -> list[int]:
        raise self.error


@pytest.mark.parametrize("error", [TransportClosedError("closed before this call"), RendezvousError("no master")])
def test_a_removal_that_comes_too_late_is_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Removals run on threads of their own, which may begin when the path is closed already."""
    writer = Writer(cast("Any", ClosedStore(error)), *cast("Any", [SimpleNamespace()] * 3))
    with caplog.at_level(logging.WARNING, logger="vllm.omni_sched"):
        writer.remove_quietly(["omni/a/1"])
    assert str(error) in caplog.text
