"""What of a step is prompt."""

from vllm.v1.core.sched.output import SchedulerOutput


def prompt_tokens_of(output: SchedulerOutput) -> int:
    """Tokens of prompts in a step: of all requests that have more than the one token, or the drafts, of a decode."""
    drafted = output.scheduled_spec_decode_tokens
    return sum(
        tokens
        for request_id, tokens in output.num_scheduled_tokens.items()
        if tokens > 1 and not (drafted and request_id in drafted)
    )
