"""Statistics of traces: derived from the files of others, kept in a file, and drawn from again."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serve.derive import SERVEGEN, derive, write_statistics
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import build
from vllm_omni_sched.sim.workloads.replay import FRACTIONS, read_statistics

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "serve" / "statistics").glob("*.json"))


def period(text: str, images: str = "{1: 1.0}") -> dict[str, str]:
    """Return sizes of one period as ServeGen writes them."""
    return {
        "text_tokens": text,
        "image_tokens": "{500: 0.5, 1000: 0.5}",
        "audio_tokens": "{0: 1.0}",
        "image_count": images,
        "output_tokens": "{20: 0.25, 40: 0.75}",
    }


def write_servegen(folder: Path) -> Path:
    """Write a folder of two clients: the first with requests in three of four windows, the second in one."""
    folder.mkdir(parents=True)
    (folder / "chunk-0-trace.csv").write_text(
        "0,1.0,0.5,Gamma,4.0,0.25\n600,1.0,0.5,Gamma,4.0,0.25\n1200,2.0,1.5,Weibull,0.7,0.4\n1800,0,0,,0,0\n"
    )
    (folder / "chunk-0-dataset.json").write_text(
        json.dumps({"0": period("{100: 1.0}"), "1200": period("{300: 1.0}", "{1: 0.5, 3: 0.5}"), "1800": period("{}")})
    )
    (folder / "chunk-7-trace.csv").write_text("0,8.0,2.0,Gamma,0.25,0.5\n")
    (folder / "chunk-7-dataset.json").write_text(json.dumps({"0": period("{50: 1.0}", "{0: 1.0}")}))
    return folder


@pytest.fixture
def servegen(tmp_path: Path) -> Path:
    return write_servegen(tmp_path / "mm-image")


def test_clients_of_servegen_are_weighted_by_their_requests(servegen: Path) -> None:
    found = derive(servegen, SERVEGEN, licence="Apache-2.0")
    assert found.source == "statistics derived from servegen: mm-image, 2 clients"
    assert found.licence == "Apache-2.0"
    larger, smaller = found.clients
    assert (larger.rate, larger.cv) == (2.0, 2.0)  # 8 a second in one window of the four of the whole trace
    assert (larger.images, larger.image_tokens) == ({0: 1.0}, ())
    assert (smaller.rate, smaller.cv) == (1.0, 1.0)  # half of its requests have a cv of 0.5, half one of 1.5
    assert smaller.images == {1: 0.75, 3: 0.25}
    assert smaller.text_tokens == tuple(100 if part <= 0.5 else 300 for part in FRACTIONS)
    assert smaller.output_tokens == tuple(20 if part <= 0.25 else 40 for part in FRACTIONS)


def test_a_trace_of_requests_is_one_client(tmp_path: Path) -> None:
    lines = [{"timestamp": 3000 * (at // 9), "input_length": 10 * at, "output_length": at} for at in range(1, 1081)]
    file = tmp_path / "conversation_trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (client,) = derive(file, "mooncake").clients
    assert client.rate == pytest.approx(3.0, rel=0.01)
    assert client.cv < 0.7  # nine arrive together every three seconds, but as many in each part of the trace
    assert client.images == {0: 1.0}
    assert client.text_tokens[FRACTIONS.index(0.5)] == pytest.approx(5400, rel=0.01)
    assert client.output_tokens[-1] == 1080


def test_images_of_a_trace_are_kept(tmp_path: Path) -> None:
    rows = "".join(f"2024-10-15 00:00:{at:02}.1,{at % 2},1000,5\n" for at in range(60))
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n" + rows)
    (client,) = derive(file, "azure", image_embeds=300).clients
    assert client.images == {0: 0.5, 1: 0.5}
    assert set(client.image_tokens) == {300}


def test_a_file_of_statistics_is_read_as_it_was_written(servegen: Path, tmp_path: Path) -> None:
    written = derive(servegen, SERVEGEN, licence="Apache-2.0")
    write_statistics(tmp_path / "derived.json", written)
    assert read_statistics(tmp_path / "derived.json") == written


def test_requests_are_drawn_as_the_statistics_say(servegen: Path, tmp_path: Path) -> None:
    write_statistics(tmp_path / "derived.json", derive(servegen, SERVEGEN))
    load = build({"kind": "statistics", "file": "derived.json"}, folder=tmp_path)
    assert load.rate == 3.0
    found = list(islice(requests(load, 1), 20_000))
    assert len(found) / found[-1].arrival == pytest.approx(3.0, rel=0.1)
    of_smaller = [one for one in found if one.client == 1]
    assert len(of_smaller) / len(found) == pytest.approx(1 / 3, rel=0.1)
    images = np.array([len(one.items) for one in of_smaller])
    assert {int(number) for number in images} == {1, 3}
    assert (images == 3).mean() == pytest.approx(0.25, abs=0.03)
    assert {one.items for one in found if one.client == 0} == {()}
    embeds = {item.embeds for one in found for item in one.items}
    assert min(embeds) == 500
    assert max(embeds) == 1000
    assert {one.text_tokens for one in found if one.client == 0} == {50}


def test_sizes_are_scaled(servegen: Path, tmp_path: Path) -> None:
    write_statistics(tmp_path / "derived.json", derive(servegen, SERVEGEN))
    scales = {"text_scale": 0.1, "output_scale": 0.5, "max_images": 2, "rate": 6.0}
    load = build({"kind": "statistics", "file": "derived.json", **scales}, folder=tmp_path)
    found = list(islice(requests(load, 1), 5_000))
    assert len(found) / found[-1].arrival == pytest.approx(6.0, rel=0.15)
    assert {one.text_tokens for one in found if one.client == 0} == {5}
    assert max(one.output_tokens for one in found) == 20
    assert {len(one.items) for one in found if one.client == 1} == {1, 2}


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_statistics_of_the_repository_name_source_and_licence(file: Path) -> None:
    found = read_statistics(file)
    assert "derived from" in found.source
    assert "Apache-2.0" in found.licence
    assert "github.com" in found.licence
    assert len(file.read_bytes()) < 50_000  # statistics, not the trace


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "of version 2 is not supported"),
        ({"clients": []}, "length >= 1"),
        ({"cv": 0}, "clients[0].cv"),
        ({"text_tokens": [1]}, "clients[0].text_tokens"),
        ({"pictures": 1}, "unknown field `pictures`"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    client = {"rate": 1.0, "cv": 1.0, "text_tokens": [1] * 15, "output_tokens": [1] * 15}
    table = {"format": "vllm-omni-sched statistics", "version": 1, "source": "", "licence": "", "clients": [client]}
    place = table if set(change) & set(table) else client
    place.update(change)
    file = tmp_path / "derived.json"
    file.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as error:
        read_statistics(file)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("chunk-7-trace.csv", "0,many,1,Gamma,1,1\n", "chunk-7-trace.csv, line 1: must be a time, a rate, a cv"),
        ("chunk-7-dataset.json", "[]", "is it a dataset of ServeGen?"),
        ("chunk-7-dataset.json", '{"0": {"text_tokens": "open(1)"}}', "0, text_tokens: must be a table of values"),
        ("chunk-7-dataset.json", '{"0": {"text_tokens": "{1: 1.0}"}}', "output_tokens is missing"),
        (
            "chunk-7-dataset.json",
            '{"0": {"text_tokens": "{1: 1.0}", "output_tokens": "{1: 1.0}", "image_count": "{1: 1.0}"}}',
            "image_tokens is missing",
        ),
    ],
)
def test_what_is_wrong_in_a_folder_is_named(name: str, text: str, says: str, servegen: Path) -> None:
    (servegen / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        derive(servegen, SERVEGEN)
    assert says in str(error.value)


def test_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no chunk-N-trace\.csv in it"):
        derive(tmp_path, SERVEGEN)
