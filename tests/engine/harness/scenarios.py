"""Define the scenarios, by name. Pictures are numbers: the same number is the same picture.

A picture costs four tokens here, a character of text one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.engine.harness.workload import IMAGE, Ask, Chunk, Request, Scenario, Session, Speech, Straggler

SCENARIOS: dict[str, Callable[[], Scenario]] = {}
ITEMS_OF_LONG_SESSION = 2000
RUN_AT_ONCE = 8
"""Requests that the engine of `rush` runs at once."""


def scenario(build: Callable[[], list]) -> Callable[[], Scenario]:  # type: ignore[type-arg]
    name = build.__name__

    def named() -> Scenario:
        return Scenario(name, build())

    SCENARIOS[name] = named
    return named


@scenario
def text() -> list[Ask]:
    return [
        Ask(f"text-{length}", "all work and no play " * length, max_tokens=8 + length, at_step=length // 2)
        for length in range(1, 7)
    ] + [Ask("again", "all work and no play " * 6, at_step=20)]


@scenario
def images() -> list[Ask]:
    """Ask for one to eight images and text; requests arrive while others are served."""
    with_images = [
        Ask(f"images-{count}", _each(count, "look: {}, "), range(10 * count, 11 * count), max_tokens=10, at_step=count)
        for count in range(1, 9)
    ]
    beside = [Ask(f"beside-{step}", "tell me more about this", max_tokens=20, at_step=step) for step in (0, 3, 6)]
    return with_images + beside


@scenario
def seeded() -> list[Ask]:
    """Sample with seeds, twice with the same one, beside a request at temperature 0; three fit into 512 tokens."""
    prompt = _each(4, "a picture {} of many, ") + "and so on"
    asks = [Ask(f"seed-{i}", prompt, range(20, 24), at_step=20 * (i // 2), seed=i % 2) for i in range(4)]
    return [*asks, Ask("beside", "tell me more about this", max_tokens=60)]


@scenario
def other_images() -> list[Ask]:
    """Ask the prompts of `images` with other pictures: were the answers equal, comparing would prove nothing."""
    return [
        Ask(f"images-{count}", _each(count, "look: {}, "), range(10 * count + 500, 11 * count + 500), max_tokens=10)
        for count in range(1, 9)
    ]


@scenario
def reversed_images() -> list[Ask]:
    """Ask `images` and then `other_images`, with items out of order."""
    return [
        replace(ask, id=f"{ask.id}{again}", at_step=ask.at_step + 40 * bool(again), items_reversed=True)
        for again, asks in (("", images().requests), ("-again", other_images().requests))
        for ask in asks
    ]


@scenario
def repeated_images() -> list[Ask]:
    """Ask for one picture several times in a request, next to itself and apart."""
    numbers = {"twins": (1, 1), "apart": (1, 2, 1, 3, 1), "all": (4,) * 8, "pairs": (5, 6, 5, 6)}
    return [Ask(id_, _each(len(of), "{} and "), of, at_step=2 * i) for i, (id_, of) in enumerate(numbers.items())]


@scenario
def shared_images() -> list[Ask]:
    """Ask for one picture in several requests: in the same step, while the first runs, and long after it."""
    same_step = [Ask(f"same-step-{i}", _each(2, f"{i}: {{}} "), (21, 22), max_tokens=12) for i in range(3)]
    later = [Ask(f"later-{step}", _each(3, "{} or "), (22, 23, 21), at_step=step) for step in (4, 5, 40)]
    return same_step + later


@scenario
def returning_images() -> list[Ask]:
    """More pictures than a small encoder cache holds, four times round, one of them in every request; who decodes
    beside them, and who leaves."""
    rounds = [
        Ask(
            f"round-{turn}-{part}",
            _each(4, "{} and ") + f"{turn}",
            (300, *range(301 + 3 * part, 304 + 3 * part)),
            max_tokens=6,
            at_step=60 * turn + 6 * part,
            abort_after=2 if (turn, part) == (2, 4) else None,
        )
        for turn in range(4)
        for part in range(8)
    ]
    return [*rounds, *(Ask(f"beside-{step}", "tell me", max_tokens=60, at_step=step) for step in (50, 110, 170))]


@scenario
def prefixes() -> list[Ask]:
    """Repeat a long beginning with images: with prefix caching most of it is never computed twice."""
    beginning = _each(6, "a picture {} of many, ")
    return [
        Ask(f"{step}", beginning + ending, range(30, 36), at_step=step)
        for step, ending in ((0, ""), (12, "and so on"), (24, "and then"), (25, "and then again"))
    ] + [Ask("other-picture", beginning + "and so on", (30, 31, 99, 33, 34, 35), at_step=36)]


@scenario
def aborts() -> list[Ask | Session]:
    """Let clients leave before the first token, in the middle, and between chunks. The others must not notice."""
    leaving: list[Ask | Session] = [
        Ask(f"leaves-{after}", _each(5, "{} and "), range(40, 45), max_tokens=30, at_step=after // 2, abort_after=after)
        for after in (0, 1, 7)
    ]
    leaving.append(
        _session("session-leaves", chunks=8, images_per_chunk=2, first=40, tokens_per_chunk=3, abort_after=10)
    )
    staying = [
        Ask(f"stays-{step}", _each(5, "{} and "), range(40, 45), max_tokens=24, at_step=step) for step in (0, 2, 6)
    ]
    return leaving + staying + [_session("session-stays", chunks=8, images_per_chunk=2, first=42, tokens_per_chunk=3)]


@scenario
def sessions() -> list[Ask | Session]:
    """Run sessions side by side: quick and slow, all at once, in text alone, and requests in between."""
    return [
        _session("quick", chunks=24, images_per_chunk=1, first=50),
        _session("slow", chunks=8, images_per_chunk=3, first=60, tokens_per_chunk=4, gap_steps=5),
        _session("same-pictures", chunks=10, images_per_chunk=2, first=50, tokens_per_chunk=2, at_step=3),
        _session("backlog", chunks=10, images_per_chunk=2, first=70, tokens_per_chunk=3, backlog=True),
        _session("text-only", chunks=10, images_per_chunk=0, tokens_per_chunk=3),
        *(
            Ask(f"between-{i}", f"between {i} " + _each(i, "{} "), range(50, 50 + i), max_tokens=12, at_step=4 * i)
            for i in range(4)
        ),
    ]


@scenario
def turns_that_stop() -> list[Ask | Session]:
    """Run sessions whose answers end by stop tokens: with the next chunk at once, later, and there before."""
    how = {"images_per_chunk": 1, "tokens_per_chunk": 9, "stops": True}
    return [
        _session("stops-at-once", chunks=12, first=50, **how),
        _session("stops-later", chunks=8, first=60, gap_steps=4, at_step=2, **how),
        _session("stops-backlog", chunks=8, first=70, backlog=True, **how),
        Ask("beside", "tell me", max_tokens=40),
    ]


@scenario
def too_long() -> list[Ask | Session]:
    """Run a session whose third chunk leaves no room below 16,384 tokens, beside one that has room."""
    chunks = [Chunk(f"{IMAGE} {index} " + "and so on " * 600, (50 + index,)) for index in range(5)]
    return [
        Session("too-long", chunks, tokens_per_chunk=3),
        _session("has-room", chunks=40, images_per_chunk=1, first=50),
        Ask("beside", "tell me", max_tokens=200),
    ]


@scenario
def long_session() -> list[Ask | Session]:
    """Run a session of `ITEMS_OF_LONG_SESSION` images, a few of which come back, beside occasional requests."""
    chunks = [
        Chunk(_each(4, "{}") + f"{index:03}", [200 + (4 * index + i) % 97 for i in range(4)])
        for index in range(ITEMS_OF_LONG_SESSION // 4)
    ]
    beside = [Ask(f"beside-{step}", _each(2, "{} "), (200, 230), max_tokens=4, at_step=step) for step in (50, 250, 450)]
    return [Session("long", chunks), *beside]


@scenario
def crowd() -> list[Ask | Session]:
    """More sessions and requests than a small KV cache holds; long answers, so that they grow while they run."""
    sessions_ = [
        _session(
            f"session-{i}", chunks=5, images_per_chunk=4, first=80 + 3 * i, tokens_per_chunk=40, gap_steps=i, at_step=i
        )
        for i in range(4)
    ]
    asks = [
        Ask(
            f"ask-{i}", f"ask {i}: " + _each(i % 4, "{} of them "), range(80, 80 + i % 4), max_tokens=60, at_step=10 * i
        )
        for i in range(8)
    ]
    return [*sessions_, *asks]


@scenario
def rush() -> list[Ask]:
    """Ask three times as much at once as the engine runs; one request in three has pictures."""
    return [
        Ask(
            f"picture-{i}" if i % 3 == 0 else f"text-{i}",
            f"question {i}: " + (_each(2, "{} and ") if i % 3 == 0 else "all work " * (i % 7)),
            range(2 * i, 2 * i + 2) if i % 3 == 0 else (),
            max_tokens=24 + i % 5,
        )
        for i in range(3 * RUN_AT_ONCE)
    ]


@scenario
def straggler() -> list[Request]:
    """Send an update for a session that has ended: beside a session that has not, and when nothing else runs."""
    return [
        _session("ended", chunks=3, images_per_chunk=2, first=50),
        _session("goes-on", chunks=24, images_per_chunk=1, first=50),
        Straggler("late", "ended", Chunk(f"{IMAGE} late", (54,)), at_step=12),
        Straggler("later", "ended", Chunk(f"{IMAGE} later", (54,)), at_step=60),
        Ask("after", f"{IMAGE} after", (54,), at_step=62),
    ]


@scenario
def speech() -> list[Speech]:
    return [
        Speech("long", frames=300, number=1),
        Speech("short", frames=60, number=2, at_step=20),
        Speech("leaves", frames=200, number=3, at_step=30, abort_after=25),
    ]


def _each(count: int, pattern: str) -> str:
    return "".join(pattern.format(IMAGE) for _ in range(count))


def _session(id_: str, *, chunks: int, images_per_chunk: int, first: int = 0, **how: object) -> Session:
    parts = [
        Chunk(
            _each(images_per_chunk, "{}") + f" part {index}",
            range(first + images_per_chunk * index, first + images_per_chunk * (index + 1)),
        )
        for index in range(chunks)
    ]
    return Session(id_, parts, **how)  # type: ignore[arg-type]
