"""Count the requests that wait in an engine, by class."""

from vllm_omni_sched.monitor.counts import SchedulerMetrics


class WaitingCounts:
    """Keeps the number of waiting requests of each class, as vLLM counts them in ``vllm:num_requests_waiting``.

    1. A request waits from `enter` to `start`, and from `wait_again` to its next `start`: after a preemption, and as a
       session between two inputs, which vLLM also has in its queues.
    2. One that leaves waits no more, whether it ended, failed or was aborted.
    3. Events about requests that never entered, or have left, change nothing. Neither do repeated ones.
    4. An event costs the same, however many requests wait.
    """

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self._classes: dict[str, str] = {}
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        """Return the number of requests in the engine."""
        return len(self._classes)

    def enter(self, request_id: str, name: str) -> None:
        """Record a request that has arrived, of the class with this name."""
        self._classes[request_id] = name
        self.wait_again(request_id)

    def start(self, request_id: str) -> None:
        """Record that a request was taken from the queue."""
        if request_id in self._waiting:
            self._waiting.remove(request_id)
            self._metrics.waiting_requests[self._classes[request_id]] -= 1

    def wait_again(self, request_id: str) -> None:
        """Record that a request is in the queue again."""
        name = self._classes.get(request_id)
        if name is not None and request_id not in self._waiting:
            self._waiting.add(request_id)
            self._metrics.waiting_requests[name] += 1

    def leave(self, request_id: str) -> None:
        """Drop a request that has left the engine."""
        self.start(request_id)
        self._classes.pop(request_id, None)
