"""Limit the prefill tokens of a step so that decoding requests meet their ITL target.

In the spirit of vLLM RFC #52906: the best budget depends on the load, so no fixed
``max_num_batched_tokens`` fits all loads. Here the step time itself is learned.
"""

from vllm_omni_sched.resource.batch_size import BatchControl, LimitReason


class AdaptivePrefill(BatchControl):
    """Chooses the token budget whose predicted step time equals the ITL target.

    1. Step time is modelled as a + b * tokens, fitted by least squares with exponential forgetting
       (Åström and Wittenmark, "Adaptive Control", 2.2), with 0 <= a <= 80 % of a recent step that had prompts.
    2. The budget is (target - a) / b, within the bounds. It grows by at most ``max_factor`` per step
       and falls without limit: a stall costs more than a step that could have been longer.
    3. While all steps have the same size, a and b cannot be told apart. Then a fades to 0, and the budget
       is corrected in proportion to target / latency: slower, but never too far.
    4. After a step above the target that was at least half full, the budget is at most that step's size.
       An emptier step was not slow because of its prompts.
    5. A step under target that was not full does not raise the budget, but is added to the fit.
    6. A step of more than 4 times the target counts as 4 times: one outlier must not outweigh hundreds of steps.
    """

    _MOST_OVER = 4.0

    def __init__(
        self,
        itl_target_seconds: float = 0.05,
        minimum: int = 64,
        maximum: int = 8192,
        forgetting: float = 0.98,
        max_factor: float = 1.25,
    ) -> None:
        super().__init__(minimum, maximum)
        self.itl_target_seconds = itl_target_seconds
        self.max_factor = max_factor
        self._fit = LineFit(forgetting)

    @property
    def base_seconds(self) -> float:
        """Return the fitted a: the seconds of a step without prefill."""
        return self._fit.at_zero

    @property
    def seconds_per_token(self) -> float:
        """Return the fitted b: the seconds per prompt token."""
        return self._fit.slope

    def _observe(self, latency_seconds: float, now: float, size: int) -> None:
        self._fit.add(size, min(latency_seconds, self._MOST_OVER * self.itl_target_seconds))
        room = self.itl_target_seconds - self._fit.at_zero
        slope = self._fit.slope
        wanted = self.minimum
        if room > 0:  # compared before divided: the slope may be 0
            wanted = self.maximum if room >= slope * self.maximum else int(room / slope)
        over = latency_seconds > self.itl_target_seconds and 2 * size >= self.limit
        if over:
            wanted = min(wanted, size, self.limit)
        elif size < self.limit and wanted > self.limit:
            self.reason = LimitReason.NOT_FILLED
            return
        most = max(int(self.limit * self.max_factor), self.limit + 1)
        wanted = min(wanted, most)
        if wanted == self.limit and self.minimum < wanted < self.maximum:
            self.reason = LimitReason.ON_TARGET
        else:
            self._set(wanted, over=over or wanted < self.limit)


class LineFit:
    """Line y = at_zero + slope * x through recent points, for x, y >= 0; O(1) per point.

    Least squares with exponential forgetting, stored as moving means and (co)variances: the same
    estimate as recursive least squares, but the line always passes through the mean of recent points.
    """

    _SURE = 0.03  # spread of x relative to its mean above which the points count more than the origin
    _MOST_BASE = 0.8  # of y at the mean of points with x > 0: beyond, noise alone would decide

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._far_weight = self._far_x = self._far_y = 0.0  # of points with x > 0

    @property
    def slope(self) -> float:
        """Return y per unit of x; bounded so that ``at_zero`` is neither negative nor most of y where x is not 0."""
        if self._far_x == 0:
            return 0.0
        through_origin = self._far_y / self._far_x
        unsure = (self._SURE * self._x) ** 2
        slope = (self._xy + unsure * through_origin) / (self._xx + unsure)
        return min(max(slope, (1 - self._MOST_BASE) * through_origin), through_origin)

    @property
    def at_zero(self) -> float:
        """Return the fitted y at x = 0."""
        return max(self._y - self.slope * self._x, 0.0)

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        self._weight = self._forgetting * self._weight + 1
        part = 1 / self._weight
        dx, dy = x - self._x, y - self._y
        self._x += part * dx
        self._y += part * dy
        self._xx = (1 - part) * (self._xx + part * dx * dx)
        self._xy = (1 - part) * (self._xy + part * dx * dy)
        if x:
            self._far_weight = self._forgetting * self._far_weight + 1
            self._far_x += (x - self._far_x) / self._far_weight
            self._far_y += (y - self._far_y) / self._far_weight
