"""`benchmarks.serve` sends its workloads, and reads what `vllm bench serve` and AIPerf write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import aiperf
from benchmarks.serve.workloads import (
    CUSTOM,
    MOONCAKE,
    RANDOM,
    RANDOM_MM,
    SERVEGEN,
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
