"""Counts the prompt tokens of a step."""

from vllm.v1.core.sched.output import SchedulerOutput


def prompt_tokens_of(output: SchedulerOutput) -> int:
    """Return the prompt tokens of a step: all tokens of requests that have more than a decode's one token or drafts."""
    drafted = output.scheduled_spec_decode_tokens
    return sum(
        tokens
        for request_id, tokens in output.num_scheduled_tokens.items()
        if tokens > 1 and not (drafted and request_id in drafted)
    )
