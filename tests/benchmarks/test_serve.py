"""`benchmarks.serve` sends its workloads, and reads what `vllm bench serve` and AIPerf write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mixed.report import record, same_tokens
from benchmarks.serve import aiperf
from benchmarks.serve.__main__ import main, parse
from benchmarks.serve.client import RoundFailed, round_of
from benchmarks.serve.plot import draw
from benchmarks.serve.workloads import (
    CUSTOM,
    MOONCAKE,
    RANDOM,
    RANDOM_MM,
    SERVEGEN,
    WORKLOADS,
    Client,
    bench_arguments,
    schedule,
)

EXPORT = Path(__file__).parent / "aiperf_export"
"""An export of AIPerf 0.13: five requests of a fixed schedule, of which the last was answered with the status 500."""


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


@pytest.mark.parametrize("client", [CUSTOM, SERVEGEN], ids=["custom", "servegen"])
def test_requests_of_a_file_have_the_pictures_that_their_kind_says(client: Client, tmp_path: Path) -> None:
    words = list(bench_arguments(client, tmp_path, 60, 3))
    lines = [json.loads(line) for line in Path(words[words.index("--dataset-path") + 1]).read_text().splitlines()]
    pictures = [[part["image"] for part in line["content"] if part["type"] == "image"] for line in lines]
    assert ["image" if own else "text" for own in pictures] == client.kinds(60, 3)
    assert "image" in client.kinds(60, 3)
    urls = [url for own in pictures for url in own]
    assert all(url.startswith("data:image/png;base64,") for url in urls)  # a server opens no local file unless told to
    assert len(set(urls)) == len(urls)  # no picture comes twice
    assert all(line["output_tokens"] > 0 for line in lines)


def test_requests_of_a_trace_have_its_sizes_scaled() -> None:
    assert MOONCAKE.prompts is not None
    prompts = MOONCAKE.prompts(2_000, 1)
    assert not any(prompt.pictures for prompt in prompts)
    words = sorted(len(prompt.text.split()) for prompt in prompts)
    assert words[len(words) // 2] == pytest.approx(69, rel=0.1)  # the median of the trace is 6,909 tokens
    assert prompts[-1].at == pytest.approx(2_000, rel=0.2)  # at one request per second
    assert MOONCAKE.burstiness == pytest.approx(1.57**-2, rel=0.01)


def test_a_schedule_has_the_requests_of_all_clients_at_their_rates() -> None:
    found = schedule([RANDOM, RANDOM_MM, MOONCAKE], 2.0, 30.0, seed=4)
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    assert len(found) == 120 + 18 + 90
    assert max(at for at, prompt in found if prompt.pictures) == pytest.approx(30.0)
    with_pictures = [prompt for _, prompt in found if prompt.pictures]
    assert len(with_pictures) == 18
    assert {len(prompt.pictures) for prompt in with_pictures} == {1, 2, 3}
    assert found == schedule([RANDOM, RANDOM_MM, MOONCAKE], 2.0, 30.0, seed=4)
    assert found != schedule([RANDOM, RANDOM_MM, MOONCAKE], 2.0, 30.0, seed=5)


def test_aiperf_makes_the_requests_of_one_client_itself(tmp_path: Path) -> None:
    words, kinds = aiperf.arguments([RANDOM_MM], tmp_path, 1.0, 20.0, seed=7)
    options = {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}
    assert kinds == ["image"] * 6
    assert (options["--random-seed"], options["--request-count"], options["--image-batch-size"]) == ("7", "6", "2")
    assert (options["--arrival-pattern"], options["--arrival-smoothness"]) == ("gamma", "0.25")
    assert [*tmp_path.iterdir()] == []


def test_aiperf_sends_all_others_at_the_times_of_a_file(tmp_path: Path) -> None:
    words, kinds = aiperf.arguments([RANDOM, RANDOM_MM], tmp_path, 1.0, 20.0, seed=7)
    assert "--fixed-schedule" in words
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert kinds == ["image" if line["images"] else "text" for line in lines]
    assert (kinds.count("text"), kinds.count("image")) == (40, 6)
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    assert {line["output_length"] for line in lines} == {200, 40}


def test_the_export_of_aiperf_is_read_by_the_order_of_its_dataset() -> None:
    answer = aiperf.read_export(EXPORT, ["text", "image", "text", "image", "text"])
    assert [(request["number"], request["kind"]) for request in answer["requests"]] == [
        (0, "text"),
        (1, "image"),
        (2, "text"),
        (3, "image"),
    ]
    first = answer["requests"][0]
    assert first["tokens"] == 8
    assert len(first["gaps"]) == 7
    assert 0 < first["ttft"] < 5
    assert len({request["digest"] for request in answer["requests"]}) > 1
    (failed,) = answer["failed"]
    assert (failed["number"], failed["kind"]) == (4, "text")
    assert "Internal Server Error" in failed["error"]
    ends = [request["at"] + request["ttft"] + sum(request["gaps"]) for request in answer["requests"]]
    assert answer["seconds"] == pytest.approx(max(ends) - min(request["at"] for request in answer["requests"]))


def test_an_export_without_all_requests_is_no_round(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match="records of 5 requests, and was to send 4"):
        aiperf.read_export(EXPORT, ["text", "image", "text", "image"])
    with pytest.raises(RoundFailed, match=r"has not exported all of its results: .*inputs\.json"):
        aiperf.read_export(tmp_path, ["text"])


def test_without_its_environment_the_benchmark_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="make bench-aiperf"):
        aiperf.program(tmp_path / ".venv-aiperf")
    monkeypatch.setattr(aiperf.program, "__defaults__", (tmp_path / ".venv-aiperf",))
    with pytest.raises(SystemExit, match=r"there is no AIPerf in \.venv-aiperf"):
        main(["--client", "aiperf"])


def test_defaults_run_every_workload_on_stock_at_its_best_too() -> None:
    options = parse([])
    assert options.workloads == list(WORKLOADS)
    assert options.variants == ["stock", "stock one picture a step", "ours"]


def test_a_picture_needs_something_to_compare(tmp_path: Path) -> None:
    records = [
        {"workload": "random", "variant": variant, "measure": "within SLO %, all rounds together", "median": 10.0}
        for variant in ("stock", "ours")
    ]
    file = draw(tmp_path / "serve.png", records)
    assert file is not None
    assert file.stat().st_size > 10_000
    assert draw(tmp_path / "none.png", records[:1]) is None
    assert not (tmp_path / "none.png").exists()
