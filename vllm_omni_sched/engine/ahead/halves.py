"""Access to the halves of our connectors, for engines that use them."""

from typing import Any

from vllm_omni_sched import compat


def worker_half() -> Any:
    """Return the worker half of this process's encode-ahead connector; None without such a connector."""
    try:
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    except ImportError:
        return None
    return get_ec_transfer().worker if has_ec_transfer() and _is_ours(get_ec_transfer()) else None


def sharing_half() -> Any:
    """Return the worker half of this process's connector of shared encodings; None without such a connector."""
    try:
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    except ImportError:
        return None
    if not has_ec_transfer() or not compat.ec_connectors_hold_back():
        return None
    from vllm_omni_sched.engine.shared.connector import SharedEncodingsConnector

    connector = getattr(get_ec_transfer(), "operators", get_ec_transfer())  # beside encode-ahead
    return connector.worker if isinstance(connector, SharedEncodingsConnector) else None


def planner_half(scheduler: Any) -> Any:
    """Return the scheduler half, which must still be bound to a core; None without such a connector."""
    connector = getattr(scheduler, "ec_connector", None)
    if connector is None or not _is_ours(connector):
        return None
    return connector.planner


def _is_ours(connector: Any) -> bool:
    if not compat.ec_connectors_hold_back():
        return False
    from vllm_omni_sched.engine.ahead.connector import EncodeAheadConnector

    return isinstance(connector, EncodeAheadConnector)
