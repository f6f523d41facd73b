"""Generate live sessions that send small items all the time."""

from collections.abc import Iterator
from itertools import count

import numpy as np
from pydantic import Field

from vllm_omni_sched.sim.work import Item
from vllm_omni_sched.sim.workloads.base import Arrival, WorkloadOptions
from vllm_omni_sched.sim.workloads.draws import contents, endless

_CLASS = "realtime"


class RealtimeOptions(WorkloadOptions):
    """Options of ``realtime``."""

    item_seconds: float = Field(0.08, gt=0, allow_inf_nan=False, description="A session sends an item this often.")
    session_items: int = Field(7500, ge=1, description="Mean items of a session; 7500 of 80 ms are ten minutes.")
    modality: str = Field("audio", min_length=1, description="Modality of the items.")
    embeds: int = Field(1, ge=1, description="Encoder embeddings of an item.")


class Realtime:
    """Live sessions: one item per ``item_seconds``, each a request of class ``realtime`` with one output token.

    1. ``rate`` counts items. There are always rate x item_seconds sessions, rounded, at least one.
    2. Sessions begin at random phases. The number of items of a session is geometric; when it ends, another ``client``
       takes its place. The rate is therefore exact up to the rounding.

    Source: streaming audio in frames of 80 ms (12.5 Hz); lengths of sessions are assumed.
    """

    thinnable = False
    source = "live sessions with one item per 80 ms, as streaming audio at 12.5 Hz; lengths of sessions are assumed"

    def __init__(self, options: RealtimeOptions) -> None:
        self._options = options
        self._sessions = max(1, round(options.rate * options.item_seconds))
        self.rate = self._sessions / options.item_seconds

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        phases, lengths, names = random.spawn(3)
        length = endless(lambda n: lengths.geometric(1 / options.session_items, size=n))
        content = contents(names)
        slots = np.sort(phases.random(self._sessions)).tolist()
        left = [next(length) for _ in slots]
        who = list(range(len(slots)))
        for period in count():  # times are products, so that they do not drift
            for slot, phase in enumerate(slots):
                item = Item(options.modality, options.embeds, next(content))
                yield Arrival((period + phase) * options.item_seconds, 0, 1, (item,), _CLASS, who[slot])
                left[slot] -= 1
                if not left[slot]:
                    left[slot], who[slot] = next(length), who[slot] + len(slots)
