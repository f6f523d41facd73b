"""Configures the connector of shared encodings, and finds its scheduler half."""

from __future__ import annotations

from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.fitted import lane_facts, operators_connector
from vllm_omni_sched.resource.engine.share_encodings import share_refusal

SHARED_CONNECTOR = "vllm_omni_sched.engine.shared.connector"
"""Module of the connector through which engines of a host share encodings."""


def attach_shared_encodings(vllm_config: Any) -> None:
    """Configure the connector of shared encodings for this engine, unless its model is not multimodal.

    Raises:
        ConfigError: the engine cannot share encodings, for the reason of `share_refusal`.
    """
    named = operators_connector(vllm_config.ec_transfer_config)
    if named is not None and named.ec_connector_module_path == SHARED_CONNECTOR:
        return
    facts = lane_facts(vllm_config)
    why_not = share_refusal(facts, None if named is None else named.ec_connector)
    if why_not is not None:
        raise ConfigError(why_not)
    if not facts.multimodal:
        return
    from vllm.config import ECTransferConfig

    vllm_config.ec_transfer_config = ECTransferConfig(
        ec_connector="SharedEncodingsConnector", ec_role="ec_both", ec_connector_module_path=SHARED_CONNECTOR
    )


def shared_planner(scheduler: Any) -> Any:
    """Return the scheduler half of the connector of shared encodings; None if the engine has none."""
    connector = getattr(scheduler, "ec_connector", None)
    if connector is None or not compat.ec_connectors_hold_back():
        return None
    from vllm_omni_sched.engine.shared.connector import SharedEncodingsConnector

    connector = getattr(connector, "operators", connector)  # beside encode-ahead
    return connector.planner if isinstance(connector, SharedEncodingsConnector) else None
