"""Register our connectors and hooks with vLLM-Omni, in every process that loads its plugins."""

from __future__ import annotations

from vllm_omni_sched.connector_names import FACTORY, register_names
from vllm_omni_sched.engine.metrics.bridge import attach
from vllm_omni_sched.imports import when_imported
from vllm_omni_sched.omni import heartbeat, parked_requests, receiving
from vllm_omni_sched.omni.stages.reports import stage_reporter
from vllm_omni_sched.omni.stages.start.hooks import hook


def register_connectors() -> None:
    """Register by name, and hook stage scheduling; nothing is made before a config asks for it. May be called twice."""
    from vllm_omni.distributed.omni_connectors import factory

    assert factory.__name__ == FACTORY
    register_names()
    hook()
    when_imported(receiving.ADAPTER, receiving.hook)
    when_imported(parked_requests.ADAPTER, parked_requests.hook)
    when_imported(heartbeat.CLIENT, heartbeat.hook)
    when_imported(heartbeat.COORDINATOR, heartbeat.hook_coordinator)
    when_imported(heartbeat.MEMBERSHIP, heartbeat.hook_membership)
    stage_reporter.start_reporting()  # in the process of a stage that was asked to report
    attach()  # for the reports of stages
