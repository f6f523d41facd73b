"""Model vLLM's prefix cache: the KV blocks of computed prompts, which later prompts with the same beginning use."""

from collections import OrderedDict

from vllm_omni_sched.sim.engine.sequence import Sequence


class PrefixCache:
    """Blocks of prompts by their hash ids, which identify a block together with all before it.

    1. A prompt finds the blocks that it begins with, until the first that is missing, but at least its last token is
       computed, as in vLLM.
    2. Blocks enter the cache when their prompt is computed, and stay while a running request has them. Others are
       evicted, the least recently used first, when running requests need the memory.
    3. A block that several running requests share counts for each of them: the cache is smaller than vLLM's by that.
       Blocks of answers are not in it, because traces do not name them.

    ``found``, ``asked``: tokens of prompts that were in the cache, and all.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._holders: dict[int, int] = {}  # of blocks that running requests have
        self._idle: OrderedDict[int, int] = OrderedDict()  # tokens of blocks that none has, least recently used first
        self._idle_tokens = 0
        self.found = 0
        self.asked = 0

    def lookup(self, sequence: Sequence, used_tokens: int) -> int:
        """Return the tokens of a prompt that need not be computed; the sequence holds their blocks until `release`.

        Args:
            used_tokens: in the KV cache, of running requests or lent to encodes.
        """
        blocks, each = sequence.blocks, sequence.block_tokens
        number, most = 0, (sequence.prompt - 1) // each
        while (
            number < len(blocks) and number < most and (blocks[number] in self._holders or blocks[number] in self._idle)
        ):
            number += 1
        for block in blocks[:number]:
            self._hold(block)
        sequence.held_blocks = number
        self.shrink(used_tokens + sequence.prompt)
        return number * each

    def count(self, found: int, asked: int) -> None:
        """Count the tokens of an admitted prompt."""
        self.found += found
        self.asked += asked

    def computed(self, sequence: Sequence) -> None:
        """Add the blocks of a computed prompt, of which whole ones are kept."""
        whole = min(len(sequence.blocks), sequence.prompt // sequence.block_tokens)
        for block in sequence.blocks[sequence.held_blocks : whole]:
            self._hold(block)
        sequence.held_blocks = max(whole, sequence.held_blocks)

    def release(self, sequence: Sequence, used_tokens: int) -> None:
        """Release the blocks of a sequence that has ended or waits again."""
        # the last ones are evicted first: those before them are worth more
        for block in reversed(sequence.blocks[: sequence.held_blocks]):
            left = self._holders[block] - 1
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]
                self._idle[block] = sequence.block_tokens
                self._idle_tokens += sequence.block_tokens
        sequence.held_blocks = 0
        self.shrink(used_tokens)

    def shrink(self, used_tokens: int) -> None:
        """Evict blocks that do not fit beside the tokens of running requests and those lent."""
        room = self._kv_tokens - used_tokens
        while self._idle and self._idle_tokens > room:
            self._idle_tokens -= self._idle.popitem(last=False)[1]

    def clear(self) -> None:
        """Empty the cache of an engine that died."""
        self._holders.clear()
        self._idle.clear()
        self._idle_tokens = 0

    def _hold(self, block: int) -> None:
        tokens = self._idle.pop(block, 0)
        self._idle_tokens -= tokens
        self._holders[block] = self._holders.get(block, 0) + 1
