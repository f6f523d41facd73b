"""The encoder beside the steps."""

from collections import deque
from collections.abc import Callable

from vllm_omni_sched.sim.kernel import Simulator

Encoded = Callable[[str, int, float], None]


class SimLane:
    """Encodes items in the order in which they come, some at a time.

    Args:
        places: how many at a time.
        seconds: what an item takes, of (modality, embeddings).
        encoded: called with the content, the ticket and the seconds of each that is done.
    """

    __slots__ = ("_encoded", "_epoch", "_queue", "_seconds", "_sim", "busy_seconds", "places", "until", "working")

    def __init__(self, sim: Simulator, seconds: Callable[[str, int], float], encoded: Encoded, places: int = 1) -> None:
        self._sim, self._seconds, self._encoded, self.places = sim, seconds, encoded, places
        self._queue: deque[tuple[str, int, str, int]] = deque()
        self._epoch = 0
        self.working = 0  # items that are being encoded
        self.busy_seconds = 0.0
        self.until = 0.0  # when the last of those that are being encoded will be done

    def submit(self, content: str, ticket: int, modality: str, embeds: int) -> None:
        """Encode an item when its turn comes."""
        self._queue.append((content, ticket, modality, embeds))
        self._begin()

    def _begin(self) -> None:
        while self._queue and self.working < self.places:
            content, ticket, modality, embeds = self._queue.popleft()
            seconds = self._seconds(modality, embeds)
            self.working += 1
            self.busy_seconds += seconds
            self.until = max(self.until, self._sim.now + seconds)
            self._sim.after(seconds, self._end, (self._epoch, content, ticket, seconds))

    def _end(self, begun: tuple[int, str, int, float]) -> None:
        epoch, content, ticket, seconds = begun
        if epoch != self._epoch:
            return
        self.working -= 1
        self._begin()
        self._encoded(content, ticket, seconds)

    def kill(self) -> None:
        """Forget everything."""
        self._epoch += 1
        self.working = 0
        self._queue.clear()
