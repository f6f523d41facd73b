"""Limit how much work runs on a replica at once, by the options of its stage."""

from vllm_omni_sched.config.stage_options.batching import BatchingOptions, BatchLimits
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.pid import PidBatch, PidGains
from vllm_omni_sched.resource.pipeline.stage_cost import Features


class ProgressiveWindow:
    """Bounds the units of long work that run at once in a replica: tokens, or denoising steps x latents.

    1. Work of at most ``first_units`` is short. It is not counted, so it never waits for long work.
    2. Long work may start if at most ``units`` run including it, or if no other long work runs: work larger than
       the window runs alone.
    3. ``units`` starts as ``first_units``: the first long work runs alone. When one finishes within the target, the
       window becomes ``growth`` times the larger of itself and the units that ran. It does not grow while less than
       1 / ``growth`` of it is used: that gives no evidence (as for TCP's congestion window, RFC 7661).
    4. When one takes longer than the target, it becomes ``shrink`` times the smaller of itself and the units that ran,
       but no less than ``first_units``.
    5. Work that began before the last change of the window gives no evidence about the present one.

    Slow start and multiplicative decrease (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988).

    Args:
        first_units: 1 or more.
        growth: above 1.
        shrink: between 0 and 1.
        target_seconds: longest time from the start of the work to its end.
    """

    def __init__(
        self, first_units: int = 64, growth: float = 2.0, shrink: float = 0.5, target_seconds: float = 1.0
    ) -> None:
        self.first_units = first_units
        self.growth = growth
        self.shrink = shrink
        self.target_seconds = target_seconds
        self._units = float(first_units)
        self._changes = 0
        self._most = 0  # most units that ran at once since the last change
        self.running = 0  # units of long work that run now
        self._running: dict[str, tuple[int, float, int]] = {}  # units, start, changes until then

    @property
    def units(self) -> int:
        """Return the size of the window in units."""
        return int(self._units)

    def counted(self, units: int) -> int:
        """Return the units that the window counts; 0 for short work."""
        return units if units > self.first_units else 0

    def begin(self, request_id: str, units: int, now: float) -> None:
        """Record that work has started, whether or not the window had room for it.

        Raises:
            ValueError: that work runs already, or the units are negative.
        """
        if units < 0 or request_id in self._running:
            raise ValueError(f"request {request_id!r}: must not run already, and units must be 0 or more, got {units}")
        if self.counted(units):
            self._running[request_id] = units, now, self._changes
            self.running += units
            self._most = max(self._most, self.running)

    def through(self, request_id: str, now: float) -> None:
        """Record that work is finished, and apply rules 3 and 4; work that is not counted has no effect."""
        if request_id not in self._running:
            return
        units, began, changes = self._running.pop(request_id)
        self.running -= units
        if changes < self._changes:
            return
        if now - began > self.target_seconds:
            self._set(max(self.shrink * min(self._units, self._most), float(self.first_units)))
        elif self._most * self.growth >= self._units:
            self._set(self.growth * max(self._units, self._most))

    def drop(self, request_id: str) -> None:
        """Forget work that ended without being done; it gives no evidence."""
        dropped = self._running.pop(request_id, None)
        if dropped is not None:
            self.running -= dropped[0]

    def _set(self, units: float) -> None:
        self._units = units
        self._changes += 1
        self._most = self.running


PIXELS_PER_LATENT = 256  # 8 x 8 by the usual autoencoder, and 2 x 2 of those per token of the transformer


def control_of(batching: BatchingOptions, limits: BatchLimits, most: int) -> PidBatch | None:
    """Return the controller of a replica's limit, None without a target; `most` is what the stage runs at once."""
    if limits.target_latency_ms is None:
        return None
    most = min(limits.max_batch_size, most)
    return PidBatch(
        limits.target_latency_ms / 1e3,
        limits.adjust_interval_ms / 1e3,
        min(limits.min_batch_size, most),
        most,
        PidGains(),
        start=most,
        memory_high=batching.memory_high,
    )


def window_of(batching: BatchingOptions, limits: BatchLimits) -> ProgressiveWindow | None:
    """Return the window that limits a replica's long work; None if there is no limit."""
    options = batching.progressive
    if limits.target_latency_ms is None or not options.enabled:
        return None
    return ProgressiveWindow(options.first_units, options.growth, options.shrink, limits.target_latency_ms / 1e3)


def units_of(kind: StageKind, features: Features) -> int:
    """Return the length of work: its prompt tokens, or for diffusion denoising steps × latents."""
    if kind is StageKind.DIFFUSION:
        return int(features.steps * (features.pixels // PIXELS_PER_LATENT))
    return int(features.prompt_tokens)
