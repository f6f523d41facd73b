"""Let a scheduler without a drafter believe that it has one."""

from __future__ import annotations


class Drafting:
    """A scheduler whose drafter reads one token behind each chunk, as vLLM sets it for EAGLE."""

    @property
    def num_prefill_lookahead(self) -> int:
        return 1

    @num_prefill_lookahead.setter
    def num_prefill_lookahead(self, _: int) -> None:
        """Ignore what vLLM sets for an engine without a drafter."""
