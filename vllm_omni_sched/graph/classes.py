"""Build the SLA classes with the targets that the options set."""

from dataclasses import replace

from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME, SlaClass


def classes_of(config: OmniSchedConfig) -> dict[str, SlaClass]:
    """Return the SLA classes by name, with the targets of ``config``."""
    realtime = replace(REALTIME, ttft_seconds=config.realtime_ttft_ms / 1e3, itl_seconds=config.realtime_itl_ms / 1e3)
    interactive = replace(
        INTERACTIVE, ttft_seconds=config.interactive_ttft_ms / 1e3, itl_seconds=config.interactive_itl_ms / 1e3
    )
    return {one.name: one for one in (realtime, interactive, BATCH)}
