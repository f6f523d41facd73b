"""Tell anomalies that begin from those that go on."""

from collections.abc import Iterable

from vllm_omni_sched.monitor.anomaly.finding import Anomaly


class News:
    """Returns each anomaly once while it lasts."""

    def __init__(self) -> None:
        self._present: set[tuple[str, str, str]] = set()

    def begun(self, found: Iterable[Anomaly]) -> list[Anomaly]:
        """Return those of all present anomalies that were not present the last time."""
        now = {(one.kind.value, one.subject, one.request_id): one for one in found}
        new = [one for key, one in now.items() if key not in self._present]
        self._present = set(now)
        return new
