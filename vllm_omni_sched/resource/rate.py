"""Learn the cost of an encode or a copy from those that were timed."""


class Rate:
    """Measures seconds per unit, as a moving average.

    1. Before the first observation it is ``start``; the first one replaces it.
    2. From then on a new observation has the weight ``weight``, whatever its size.

    Args:
        start: seconds per unit, 0 or more.
        weight: weight of a new observation, in (0, 1].
    """

    def __init__(self, start: float, weight: float = 0.2) -> None:
        self.per_unit = start
        self.weight = weight
        self.is_measured = False

    def observe(self, units: float, seconds: float) -> None:
        """Record that ``units`` took ``seconds``; zero units are ignored."""
        if units <= 0:
            return
        rate = max(0.0, seconds) / units
        self.per_unit += (rate - self.per_unit) * (self.weight if self.is_measured else 1.0)
        self.is_measured = True

    def seconds(self, units: float) -> float:
        """Return the expected seconds of ``units``."""
        return self.per_unit * units


class EncodeCost:
    """Estimates the seconds to encode an item.

    1. A modality that was timed costs its own seconds per encoder embedding.
    2. One that was not costs what all timed ones cost; before any was timed, ``start`` per embedding. So without
       measurements the cost is in proportion to the embeddings, an estimate: real encoders are not quite linear.
    3. Prompt embeddings are not encoded at all.

    Times of a lane include its pauses: an encode costs more beside a busy LLM, and counts so here.

    Args:
        start: seconds per embedding.
    """

    def __init__(self, start: float = 1e-4) -> None:
        self._all = Rate(start)
        self._by_modality: dict[str, Rate] = {}

    def observe(self, modality: str, num_embeds: int, seconds: float) -> None:
        """Record that so many embeddings of this modality took ``seconds`` in total."""
        self._all.observe(num_embeds, seconds)
        self._by_modality.setdefault(modality, Rate(0.0)).observe(num_embeds, seconds)

    def seconds(self, modality: str, num_embeds: int) -> float:
        """Return the expected seconds to encode one item of ``num_embeds`` embeddings."""
        if modality == "prompt_embeds":
            return 0.0
        rate = self._by_modality.get(modality)
        return (self._all if rate is None or not rate.is_measured else rate).seconds(num_embeds)
