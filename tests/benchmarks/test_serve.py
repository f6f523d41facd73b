"""What `benchmarks.serve` sends, and how it reads what `vllm bench serve` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mixed.report import record, same_tokens
from benchmarks.serve.__main__ import parse
from benchmarks.serve.client import RoundFailed, round_of
from benchmarks.serve.plot import draw
from benchmarks.serve.workloads import CUSTOM, WORKLOADS


def result(**columns: list[Any]) -> dict[str, Any]:
    """Return a detailed result of `vllm bench serve` of two requests."""
    return {
        "start_times": [10.0, 11.0],
        "ttfts": [0.5, 2.5],
        "itls": [[0.1, 0.2], [0.05]],
        "output_lens": [3, 2],
        "generated_texts": ["a b c", "d e"],
        "errors": ["", ""],
        **columns,
    }


def test_requests_are_read_as_those_of_a_round() -> None:
    first, second = round_of([(result(), ["text", "image"])])["requests"]
    assert (first["kind"], first["at"], first["ttft"], first["gaps"], first["tokens"]) == (
        "text",
        10.0,
        0.5,
        [0.1, 0.2],
        3,
    )
    assert second["kind"] == "image"
    assert first["digest"] != second["digest"]
    answers: Any = {("stock", "random"): [{"requests": [first, second], "seconds": 3.0}]}
    answers["ours", "random"] = answers["stock", "random"]
    assert same_tokens(answers, "random", ["stock", "ours"]) == [True, True]
    medians = {one["measure"]: one["median"] for one in record(answers) if one["variant"] == "ours"}
    assert medians["image TTFT P50"] == 2500
    assert medians["within SLO %"] == 0
    assert medians["tokens / s"] == pytest.approx(5 / 3, abs=1e-3)
    assert medians["requests with the tokens of stock %"] == 100


def test_a_failed_request_misses_its_slo_and_loses_nothing_else() -> None:
    kinds = ["text", "text"]
    sound, broken = round_of([(result(), kinds)]), round_of([(result(errors=["", "Bad Request\n"]), kinds)])
    assert [request["number"] for request in broken["requests"]] == [0]
    assert broken["failed"] == [{"kind": "text", "number": 1, "error": "Bad Request"}]
    answers: Any = {("stock", "random"): [sound, sound], ("ours", "random"): [sound, broken]}
    assert same_tokens(answers, "random", ["stock", "ours"]) == [True, True, True]
    values = {(one["variant"], one["measure"]): one["median"] for one in record(answers)}
    assert values["ours", "failed requests, all rounds together"] == 1
    assert ("stock", "failed requests, all rounds together") not in values


def test_a_round_without_any_answer_has_no_result() -> None:
    with pytest.raises(RoundFailed, match="all 2 requests failed: Bad Request"):
        round_of([(result(errors=["Bad Request", "Bad Request"]), ["text", "text"])])


def test_requests_of_several_clients_are_numbered_in_one_row() -> None:
    both = round_of([(result(), ["text", "text"]), (result(), ["image", "image"])])
    assert [request["number"] for request in both["requests"]] == [0, 1, 2, 3]
    assert both["seconds"] == pytest.approx(3.55)


def test_a_result_without_all_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        round_of([(result(), ["text"])])


def test_custom_requests_have_the_pictures_that_their_kind_says(tmp_path: Path) -> None:
    words = list(CUSTOM.arguments(tmp_path, 60, 3))
    lines = [json.loads(line) for line in Path(words[words.index("--dataset-path") + 1]).read_text().splitlines()]
    pictures = [[part["image"] for part in line["content"] if part["type"] == "image"] for line in lines]
    assert ["image" if own else "text" for own in pictures] == CUSTOM.kinds(60, 3)
    assert {"image", "text"} == set(CUSTOM.kinds(60, 3))
    urls = [url for own in pictures for url in own]
    assert all(url.startswith("data:image/png;base64,") for url in urls)  # a server opens no local file unless told to
    assert len(set(urls)) == len(urls)  # no picture comes twice


def test_defaults_run_every_workload_on_stock_at_its_best_too() -> None:
    options = parse([])
    assert options.workloads == list(WORKLOADS)
    assert options.variants == ["stock", "stock one picture a step", "ours"]


def test_a_picture_needs_something_to_compare(tmp_path: Path) -> None:
    records = [
        {"workload": "random", "variant": variant, "measure": "tokens / s, all rounds together", "median": 10.0}
        for variant in ("stock", "ours")
    ]
    file = draw(tmp_path / "serve.png", records)
    assert file is not None
    assert file.stat().st_size > 10_000
    assert draw(tmp_path / "none.png", records[:1]) is None
    assert not (tmp_path / "none.png").exists()
