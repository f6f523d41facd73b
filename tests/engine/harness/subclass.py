"""A scheduler as an operator may write one on top of ours."""

from vllm_omni_sched import OmniScheduler


class CustomScheduler(OmniScheduler):
    """Ours, under a name that does not show it."""
