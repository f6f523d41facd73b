"""Traces of others are read as their authors describe them, and what is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_omni_sched.cli import app
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace
from vllm_omni_sched.sim.workloads.trace import read_trace

AIPERF_OK = {
    "metadata": {"request_start_ns": 1759813207500000000, "turn_index": 0},
    "metrics": {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 9, "unit": "tokens"},
    },
    "error": None,
}
AIPERF_FAILED = {
    "metadata": {"request_start_ns": 1759813206000000000},
    "metrics": {"error_isl": {"value": 550, "unit": "tokens"}},
    "error": {"code": 499},
}
FILES = {
    TraceFormat.MOONCAKE: '{"timestamp": 3500, "input_length": 1800, "output_length": 26, "hash_ids": [0, 3]}\n'
    '{"timestamp": 500, "input_length": 655, "output_length": 52, "hash_ids": [0, 1]}\n\n',
    TraceFormat.AZURE: "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,655,52\n2023-11-16 18:15:49.6805900,1800,26\n",
    TraceFormat.BURSTGPT: "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,655,52,707,Conversation log\n6,ChatGPT,9,0,9,Conversation log\n8,GPT-4,1800,26,1826,API log\n",
    TraceFormat.VLLM_BENCH: json.dumps(
        {"start_times": [103.5, 100.5], "input_lens": [1800, 655], "output_lens": [26, 52], "backend": "openai"}
    ),
}
LEFT_OUT = {TraceFormat.BURSTGPT: 1}


def written(folder: Path, text: str) -> Path:
    file = folder / "theirs"
    file.write_text(text)
    return file


@pytest.mark.parametrize("format", FILES)
def test_requests_are_in_order_from_0_on(format: TraceFormat, tmp_path: Path) -> None:
    found = import_trace(written(tmp_path, FILES[format]), format)
    first, second = found.trace.requests
    assert (first.at, first.text_tokens, first.output_tokens, first.items) == (0, 655, 52, ())
    assert (second.at, second.text_tokens, second.output_tokens) == (pytest.approx(3.0), 1800, 26)
    assert found.left_out == LEFT_OUT.get(format, 0)
    assert found.trace.header.source == f"theirs, imported as {format.value}"


def test_failed_requests_of_aiperf_are_left_out(tmp_path: Path) -> None:
    later = {**AIPERF_OK, "metadata": {"request_start_ns": 1759813208250000000}}
    text = "".join(json.dumps(one) + "\n" for one in (AIPERF_FAILED, later, AIPERF_OK))
    found = import_trace(written(tmp_path, text), TraceFormat.AIPERF)
    assert [(one.at, one.text_tokens, one.output_tokens) for one in found.trace.requests] == [
        (0, 550, 9),
        (pytest.approx(0.75), 550, 9),
    ]
    assert found.left_out == 1


def test_images_take_their_part_of_the_prompt(tmp_path: Path) -> None:
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    text += "2024-10-15 00:00:00.1,2,1000,5\n2024-10-15 00:00:01,3,700,5\n2024-10-15 00:00:02,0,50,5\n"
    file = written(tmp_path, text)
    with_images = import_trace(file, TraceFormat.AZURE, image_embeds=300).trace.requests
    assert [(one.text_tokens, one.items) for one in with_images] == [
        (400, (("image", 300),) * 2),
        (100, (("image", 300),) * 2),  # the prompt has room for two of three
        (50, ()),
    ]
    assert [one.text_tokens for one in import_trace(file, TraceFormat.AZURE).trace.requests] == [1000, 700, 50]


@pytest.mark.parametrize(
    ("format", "text", "says"),
    [
        (TraceFormat.MOONCAKE, '{"timestamp": 1}\n', "theirs, line 1: Object missing required field `input_length`"),
        (TraceFormat.MOONCAKE, '{"timestamp": 1,\n', "theirs, line 1: "),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 1, "input_length": -1, "output_length": 1}',
            "theirs, line 1: input_length must be a whole number from 0 to 1,000,000,000, got -1",
        ),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 1, "input_length": 0, "output_length": 1}',
            "theirs, line 1: input_length is 0, and vLLM refuses empty prompts: delete the request",
        ),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 1e300, "input_length": 9, "output_length": 1}',
            "theirs, line 1: timestamp is 1e+297 s, which is no time of a request: milliseconds since the start are "
            "expected; correct the line, or delete it",
        ),
        (TraceFormat.AZURE, "Timestamp,Tokens\n", "line 1: the column 'TIMESTAMP' is missing"),
        (
            TraceFormat.AZURE,
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
            "line 2: TIMESTAMP must be like 2023-11-16 18:15:46.68, got 'yesterday'",
        ),
        (
            TraceFormat.AZURE,
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n",
            "line 2: the line is incomplete",
        ),
        (
            TraceFormat.BURSTGPT,
            "Timestamp,Request tokens,Response tokens\n1,many,1\n",
            "line 2: Request tokens must be a whole number from 0 to 1,000,000,000, got 'many'",
        ),
        (
            TraceFormat.BURSTGPT,
            "Timestamp,Request tokens,Response tokens\nnan,1,1\n",
            "line 2: Timestamp is nan, which is not a number: seconds since the start are expected; correct the "
            "line, or delete it",
        ),
        (TraceFormat.BURSTGPT, "Timestamp,Request tokens,Response tokens\n1,1,0\n", "no request with output tokens"),
        (TraceFormat.VLLM_BENCH, '{"mean_ttft_ms": 3}', "run vllm bench serve with --save-result --save-detailed"),
        (
            TraceFormat.VLLM_BENCH,
            '{"start_times": [1], "input_lens": [1, 2], "output_lens": [1]}',
            "start_times, input_lens and output_lens must have the same length",
        ),
    ],
)
def test_what_is_wrong_is_named(format: TraceFormat, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        import_trace(written(tmp_path, text), format)
    assert says in str(error.value)


@pytest.mark.parametrize(("spelling", "tokens"), [("5", 5), ("5.0", 5), ("5e0", 5), ("5.9", None), ("-5", None)])
def test_a_whole_number_is_accepted_in_any_spelling(spelling: str, tokens: int | None, tmp_path: Path) -> None:
    file = written(tmp_path, '{"timestamp": 1, "input_length": TOKENS, "output_length": 1}'.replace("TOKENS", spelling))
    if tokens is None:
        with pytest.raises(ConfigError, match="line 1: input_length"):
            import_trace(file, TraceFormat.MOONCAKE)
    else:
        assert [one.text_tokens for one in import_trace(file, TraceFormat.MOONCAKE).trace.requests] == [tokens]


def test_a_packed_file_is_to_be_unpacked(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv.gz"
    file.write_bytes(b"\x1f\x8b\x08\x00\xff\xff")
    with pytest.raises(ConfigError, match="unpack it first"):
        import_trace(file, TraceFormat.AZURE)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        import_trace(tmp_path / "none", TraceFormat.AZURE)


def test_the_command_writes_a_trace_that_the_simulator_reads(tmp_path: Path) -> None:
    file, out = written(tmp_path, FILES[TraceFormat.BURSTGPT]), tmp_path / "ours.jsonl"
    arguments = ["import", str(file), "--format", "burstgpt", "--out", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "2 requests over 3 s in" in ran.output
    assert "1 without output left out" in ran.output
    assert [one.output_tokens for one in read_trace(out).requests] == [52, 26]
    again = CliRunner().invoke(app, arguments)
    assert (again.exit_code, "exists already" in again.output) == (2, True)
