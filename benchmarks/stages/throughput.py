"""Bursts of different requests with the options that users get: there is nothing to gain, and nothing may be lost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.harness.stats import quantile
from benchmarks.stages import OURS, STOCK, VARIANTS
from benchmarks.stages.load import sized
from benchmarks.stages.pair import Pair, Turn, Wave
from benchmarks.stages.record import Bar, answered, different, entry
from benchmarks.stages.settings import Settings
from dev.omni_cpu.spec import TEXT_TO_SOUND, Mode

TASK = "throughput"
SEQS = 64  # as vLLM-Omni deploys Qwen3-Omni
OPTIONS: dict[str, object] = {}
LEAST = 0.97  # of stock's throughput
LONG = 1500  # tokens from which a cell has half of the rounds
MODES: dict[Mode, str] = {"full_payload": "whole payloads", "async_chunk": "chunks"}


class Cell(NamedTuple):
    """So many requests at once, with prompts of so many tokens; ``stream``: clients get each token when it is made."""

    requests: int
    tokens: int
    stream: bool = False

    def __str__(self) -> str:
        return f"{self.requests} of {self.tokens:,} tokens" + (", streamed" if self.stream else "")


CELLS = (*(Cell(requests, tokens) for tokens in (20, 200, 1500) for requests in (48, 96)),)
CELLS += (Cell(48, 200, stream=True), Cell(96, 200, stream=True))


def run(settings: Settings) -> list[dict[str, Any]]:
    found = []
    for mode, name in MODES.items():
        rng = settings.rng(f"{TASK} {mode}")
        turns: dict[Cell, list[Turn]] = {cell: [] for cell in CELLS}
        spec = {"pipeline": TEXT_TO_SOUND, "mode": mode, "replicas": 1, "max_model_len": 2048}
        with settings.pair(SEQS, OPTIONS, kv_cache_bytes=256 << 20, **spec) as pair:
            for number in range(-1, settings.rounds):
                for cell in CELLS:
                    if number < 0 or cell.tokens < LONG or number % 2 == 0:
                        requests = sized(cell.requests, cell.tokens, rng, stream=cell.stream)
                        turn = pair.turn(requests, rng)
                        start_again_where_not_answered(pair, turn)
                        if number >= 0:  # the first round warms up
                            turns[cell].append(turn)
        found += record(name, turns)
    return found


def start_again_where_not_answered(pair: Pair, turn: Turn) -> None:
    """Start a pipeline again that has failed requests: bursts of chunks can end a stage of vLLM-Omni 0.30."""
    for name, wave in turn.items():
        if not all_answered(wave):
            pair.start_again(name)


def all_answered(wave: Wave) -> bool:
    return answered(wave) == len(wave["told"])


def record(mode: str, turns: dict[Cell, list[Turn]]) -> list[dict[str, Any]]:
    found = []
    for cell, own in turns.items():
        # the time in which a pipeline fails says nothing of its throughput; what was not answered is counted below
        timed = [turn for turn in own if all(map(all_answered, turn.values()))]
        if not timed:
            continue
        found.append(measure(f"{mode}, {cell}: all answered", timed, lambda wave: wave["seconds"], Bar(1 / LEAST)))
        found.append(measure(f"{mode}, {cell}: TTFT P50", timed, lambda wave: statistics.median(firsts(wave))))
        found.append(measure(f"{mode}, {cell}: TTFT P99", timed, lambda wave: quantile(firsts(wave), 0.99)))
        found.append(measure(f"{mode}, {cell}: CPU time", timed, lambda wave: sum(wave["cpu_seconds"].values())))
    every = [(cell, turn) for cell, own in turns.items() for turn in own]
    missing = {name: [cell.requests - answered(turn[name]) for cell, turn in every] for name in VARIANTS}
    none = Bar(0, "worst")
    found.append(entry(TASK, f"{mode}: not answered", missing[OURS], missing[STOCK], unit="requests", bar=none))
    pairs = [zip(*map(lengths, turn.values()), strict=True) for _, turn in every]
    shorter = [sum(a != b for a, b in each if a is not None and b is not None) for each in pairs]
    found.append(entry(TASK, f"{mode}: answers of another length than stock's", shorter, unit="answers", bar=none))
    others = [different(turn[OURS], turn[STOCK]) for _, turn in every]
    found.append(entry(TASK, f"{mode}: answers with other tokens than stock's", others, unit="answers"))
    return found


def lengths(wave: Wave) -> list[dict[str, int] | None]:
    """Return how many tokens of each stage each answer has: which tokens, the batch decides, in stock too."""
    answers = [one["answer"] for one in wave["told"]]
    return [one and {stage: len(tokens) for stage, tokens in one["text"].items()} for one in answers]


def measure(label: str, turns: Sequence[Turn], of: Any, bar: Bar | None = None) -> dict[str, Any]:
    ours, stock = ([of(turn[name]) for turn in turns] for name in (OURS, STOCK))
    return entry(TASK, label, ours, stock, bar=bar)


def firsts(wave: dict[str, Any]) -> list[float]:
    return [one["first"] - one["at"] for one in wave["told"] if one["first"] is not None]
