"""Answer what tests ask a worker process (`worker_extension_cls`, reached through `collective_rpc`)."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """vLLM adds this class to the bases of its worker."""

    model_runner: Any

    def classes_of_runner(self) -> list[str]:
        """Qualified names of the model runner's class and its bases."""
        return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(self.model_runner).__mro__[:-1]]

    def requests_in_runner(self) -> list[str]:
        """Ids of the requests that the model runner still holds."""
        return sorted(self.model_runner.requests)
