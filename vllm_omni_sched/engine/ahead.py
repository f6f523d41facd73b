"""Finds the halves of the encode-ahead connector, where it is the one in use."""

from typing import Any


def worker_half() -> Any:
    """The worker half of this process's connector; None where there is none, or another."""
    try:
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    except ImportError:
        return None
    return getattr(get_ec_transfer(), "worker", None) if has_ec_transfer() else None


def planner_half(scheduler: Any) -> Any:
    """The scheduler half, bound to ``scheduler``; None where there is none, or another."""
    planner = getattr(getattr(scheduler, "ec_connector", None), "planner", None)
    if planner is not None:
        planner.bind(scheduler)
    return planner
