"""Run the checks that a start and ``doctor`` share."""

from collections.abc import Callable, Iterable

from vllm_omni_sched.config.errors import OmniSchedError

Check = Callable[[], object]
"""Raises an `OmniSchedError` if something cannot work."""


def refuse(checks: Iterable[Check]) -> None:
    """Run the checks of a start: the first problem is raised."""
    for check in checks:
        check()


def problems(checks: Iterable[Check]) -> list[str]:
    """Run all checks, and return what they refuse, each problem once."""
    found: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except OmniSchedError as error:
            found[str(error)] = None
    return [*found]
