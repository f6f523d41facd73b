"""Define a scheduler that extends ours, as an operator may write one."""

from vllm_omni_sched import OmniScheduler


class CustomScheduler(OmniScheduler):
    """Ours, under a name that does not show it."""
