"""`vllm-omni-sched plan`: its page, its files, and with which status it ends."""

import json
import random

import pytest
from typer.testing import CliRunner

from tests.unit.sim.workloads.test_derived import write_servegen
from vllm_omni_sched.cli import app, plan
from vllm_omni_sched.sim.workloads.importers import TraceFormat
from vllm_omni_sched.sim.workloads.statistics import import_statistics, write_statistics

pytestmark = pytest.mark.once  # nothing here reaches vLLM

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
QUICK = ("--gpus", "a100-80gb,l40s", "--max-gpus", 4, "--seeds", 1, "--trials", 4, "--quiet")


@pytest.fixture
def trace(tmp_path):
    """Write a small trace in Mooncake's form, whose requests share prefixes."""
    rng, lines = random.Random(3), []
    for at in range(120):
        blocks = [1, 2, 100 + at] if at % 2 else [200 + at]
        lines.append({"timestamp": 500 * at, "input_length": 512 * len(blocks), "output_length": rng.randrange(2, 40),
                      "hash_ids": blocks})  # fmt: skip
    file = tmp_path / "conversation.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def test_a_page_a_record_and_a_picture(trace, tmp_path):
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    out, png = tmp_path / "plan.json", tmp_path / "plan.png"
    status, said = run(
        trace, "--format", "mooncake", "--model", folder, "--served", "meta-llama/Llama-3.1-8B", *QUICK,
        "--slo", "ttft=2,tpot=0.1,attainment=0.9", "--price", "l40s=0.5", "--out", out, "--png", png,
    )  # fmt: skip
    assert status == 0, said
    assert said.startswith("1 x l40s (one replica), $0.50 per hour")
    assert "Our options make it no cheaper" in said
    assert "The prefix cache has" in said
    assert "vllm serve meta-llama/Llama-3.1-8B --max-num-batched-tokens" in said
    record = json.loads(out.read_text())
    assert record["simulated"] is True
    assert record["best"] == "stock"
    best = record["plans"]["stock at its best"]
    assert (best["device"], best["devices"], best["dollars_per_hour"]) == ("l40s", 1, 0.5)
    assert best["attainment"] >= 0.9
    assert best["command"] in said
    assert record["slo"]["itl_of"] == "mean"
    assert record["trials"]["stock"] > 0
    assert png.read_bytes().startswith(b"\x89PNG")
    # the same again
    assert run(trace, "--format", "mooncake", "--model", folder, *QUICK, "--out", out, "--price", "l40s=0.5",
               "--served", "meta-llama/Llama-3.1-8B", "--slo", "ttft=2,tpot=0.1,attainment=0.9")[1] == said  # fmt: skip


def test_a_trace_of_others_without_a_format_is_recognised(trace, tmp_path):
    status, said = run(trace, *QUICK)
    assert status == 2
    assert "conversation.jsonl has the fields of a trace of mooncake: add --format mooncake" in said
    file = tmp_path / "theirs"
    for text in ('{"time": 1, "tokens": 5}\n', "time,tokens\n"):
        file.write_text(text)
        status, said = run(file, *QUICK)
        assert status == 2
        assert "if others wrote it, name the --format: mooncake, azure, burstgpt, vllm-bench, aiperf, servegen" in said


def test_tables_are_whole_where_the_output_is_no_terminal(trace, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    result = CliRunner().invoke(app, ["plan", str(trace), *map(str, EASY)], catch_exceptions=False)
    head = next(line for line in result.stdout.splitlines() if "GPUs" in line and "busy" in line)
    assert "95 % interval" in head
    assert "P99 gap, ms" in head


@pytest.mark.parametrize("command", [one.name for one in app.registered_commands])
def test_usage_names_arguments_without_braces(command):
    usage = CliRunner().invoke(app, [command, "--help"]).stdout.split("Usage: ")[1].splitlines()[0]
    for word in usage.split("[OPTIONS]")[1].split():
        assert word.strip("[]").replace("_", "").replace("|", "").isupper()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slo", "ttft=fast"), "--slo 'ttft=fast': write it as ttft=2,itl=0.1,attainment=0.9"),
        (("--slo", "itl=0.1,tpot=0.1"), "tpot is given twice, or both itl and tpot"),
        (("--price", "h100-80gb=cheap"), "--price h100-80gb=cheap: write it as GPU=DOLLARS"),
        (("--gpus", "h100"), "unknown device 'h100': did you mean 'h100-80gb'?"),
        (("--model", "llama"), "unknown model 'llama'"),
        (("--weights", "fp4"), "--weights must be one of bf16, fp8, int8, int4, mxfp4, nvfp4, got 'fp4'"),
        (
            ("--calibration", "costs.json", "--gpus", "l40s", "--weights", "fp8"),
            "--weights and --kv-fp8 need --model: a calibration is of the engine as it was measured",
        ),
        (("--scale", "0"), "--scale must be positive, got 0"),
        (("--calibration", "costs.json"), "--calibration needs --gpus with the one kind that was measured"),
        (("--model", "qwen2.5-vl-72b", "--max-gpus", "1"), "does not fit"),
        (("--slo", "ttft=0.001"), "no plan of stock vLLM with up to 4 devices meets the SLO in training"),
        (("--patience", "soon"), "--patience 'soon': write it as 10, or 5-30"),
        (("--patience", "9-3"), "--patience '9-3': write it as 10, or 5-30"),
        (("--kv-link", "infiniband"), "unknown --kv-link 'infiniband'"),
        (("--kv-link", "0"), "--kv-link must be above 0 GB/s, got 0"),
        (("--speculation", "method=ngram"), "--speculation: acceptance is missing"),
        (("--speculation", "method=eagle3,acceptance=0.7"), "method 'eagle3' needs model=NAME, the drafter"),
        (("--speculation", "method=ngram,acceptance=7"), "acceptance must be between 0 and 1, got '7'"),
        (("--speculation", "tokens=7"), "--speculation 'tokens=7': write it as method=ngram,acceptance=0.4"),
        (
            ("--calibration", "tests/data/none.json", "--gpus", "l40s", "--speculation", "method=ngram,acceptance=0.4"),
            "none.json",
        ),
    ],
)
def test_what_is_wrong_is_said(trace, arguments, said):
    status, text = run(trace, "--format", "mooncake", *QUICK, *arguments)
    assert status == 2
    assert said in text


def test_the_users_word_on_weights_counts_before_the_file(trace, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "torchao"}}))
    rest = (trace, "--format", "mooncake", *QUICK, "--model", file, "--slo", "ttft=2,tpot=0.1", "--max-gpus", 1)
    status, said = run(*rest)
    assert status == 2
    assert "the quant_method 'torchao' is not known: name the format of the weights with `plan --weights`" in said
    status, said = run(*rest, "--weights", "int4", "--out", tmp_path / "plan.json")
    assert status == 0, said
    assert "--quantization" not in said  # the checkpoint has it


@pytest.fixture
def config(tmp_path):
    """Write a config.json with these further fields, and return its folder."""

    def write(**more):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | more))
        return folder

    return write


EASY = ("--format", "mooncake", *QUICK, "--slo", "ttft=9,tpot=9,attainment=0.5", "--no-split")


@pytest.mark.parametrize(
    ("model", "arguments", "name", "note"),
    [
        ("qwen2.5-vl-7b", (), "Qwen/Qwen2.5-VL-7B-Instruct", None),
        ({}, (), "MODEL", "Write the name of your model for MODEL in the command, or give it with --served."),
        ({}, ("--served", "./weights"), "./weights", None),
        (
            {"_name_or_path": "meta-llama/Llama-3.1-8B"}, (), "meta-llama/Llama-3.1-8B",
            "The name meta-llama/Llama-3.1-8B is that in its config.json: check it, or set --served.",
        ),
        ({"_name_or_path": "/data/checkpoints/last"}, (), "MODEL", "Write the name of your model"),
    ],
)  # fmt: skip
def test_the_command_names_the_model(trace, config, model, arguments, name, note):
    status, said = run(trace, "--model", model if isinstance(model, str) else config(**model), *EASY, *arguments)
    assert status == 0, said
    assert f"vllm serve {name} --" in said
    if note is None:
        assert "config.json" not in said
        assert "MODEL" not in said
    else:
        assert note in said


FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("more", "weights", "served", "says"),
    [
        ({}, "fp8", "", "vLLM makes the fp8 weights of MODEL from bf16 ones when it loads them."),
        (
            {},
            "int4",
            "org/Llama-AWQ",
            "org/Llama-AWQ must be a checkpoint with int4 weights: those of --model are bf16.",
        ),
        (FP8, "bf16", "org/Llama", "org/Llama must be a checkpoint with bf16 weights: those of --model are fp8."),
    ],
)
def test_weights_of_another_format_are_made_by_vllm_or_those_of_a_checkpoint(
    trace, config, more, weights, served, says
):
    named = ("--served", served) if served else ()
    status, said = run(trace, "--model", config(**more), *EASY, "--weights", weights, *named)
    assert status == 0, said
    assert says in said
    assert ("--quantization fp8" in said) is (weights == "fp8")


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, "int4"),
        (FP8, "bf16"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "fp8"),
    ],
)
def test_weights_that_vllm_does_not_make_are_refused(trace, config, more, weights):
    status, said = run(trace, "--model", config(**more), *EASY, "--weights", weights)
    assert status == 2
    assert f"--weights {weights}: the checkpoint of model has" in said
    assert "name a checkpoint that has them with --served, or give its config.json as --model" in said


def test_a_device_without_room_for_the_longest_request_is_left_out_with_the_reason(tmp_path, config):
    lines = [{"timestamp": 60_000 * at, "input_length": 130_000, "output_length": 2} for at in range(24)]
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    slow = ("--slo", "ttft=100,tpot=9,attainment=0.9", "--gpus", "a100-40gb", "--max-gpus")
    status, said = run(file, "--model", config(), *EASY, *slow, 2)
    assert status == 0, said
    assert "Left out, as the longest request has 130,002 tokens with its answer: 1 x a100-40gb has room for a" in said
    assert "--tensor-parallel-size 2" in said
    status, said = run(file, "--model", config(), *EASY, *slow, 1)
    assert status == 2
    assert "the longest request has 130,002 tokens with its answer, but the KV cache of 1 x a100-40gb" in said


def test_a_plan_that_misses_the_held_out_requests_ends_with_2_and_no_command(tmp_path):
    """Every other block of five minutes is held out; its requests come at once, and those of training one by one."""
    lines = []
    for block in range(12):
        for number in range(60):
            at = 300 * block + (5 * number if block % 2 == 0 or number == 59 else 0.01 * number)
            lines.append({"timestamp": 1e3 * at, "input_length": 4000, "output_length": 2})
    file, out = tmp_path / "uneven.jsonl", tmp_path / "plan.json"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, said = run(file, *EASY, "--gpus", "l40s", "--max-gpus", 1, "--slo", "ttft=2,tpot=1", "--out", out)
    assert status == 2
    assert "no plan with up to 1 devices meets the SLO with the held-out requests: 1 x l40s reach" in said
    assert "vllm serve" not in said
    assert not out.exists()


def test_a_split_for_stock_and_where_prices_are_from(tmp_path):
    """Each prompt breaks the gaps of long answers beside it: four devices, or two, one of which only has prompts."""
    out, trace = tmp_path / "plan.json", tmp_path / "answers.jsonl"
    rng, at, lines = random.Random(5), 0.0, []
    for number in range(120):
        at += rng.expovariate(1.0)
        lines.append({"timestamp": 1e3 * at, "input_length": 8192, "output_length": 300, "hash_ids": [number]})
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        trace, "--format", "mooncake", "--gpus", "a100-80gb,l40s", "--max-gpus", 8, "--seeds", 1, "--quiet",
        "--slo", "ttft=4,itl=0.02,attainment=0.7", "--price", "a100-80gb=1.5", "--out", out, "--trials", 8,
    ]  # fmt: skip
    status, said = run(*arguments, "--patience", "5-10")
    assert status == 0, said
    record = json.loads(out.read_text())
    given = {"dollars_per_hour": 1.5, "kind": "given", "source": "given with --price"}
    assert record["prices"]["a100-80gb"] == given
    assert record["prices"]["l40s"]["kind"] == "assumed"
    assert "a100-80gb 1.50 (given), l40s 1.00 (assumed)" in said
    assert "of the clients give up before their first token" in said
    assert record["load"]["patience_seconds"] == [5.0, 10.0]
    assert record["kv_link"]["bytes_per_second"] == 50e9
    best, pool = record["plans"]["stock at its best"], record["plans"]["stock in one pool"]
    assert (best["prefill"]["replicas"], best["replicas"], best["devices"]) == (1, 1, 2)
    assert best["command"].count("vllm serve") == 2
    assert pool["dollars_per_hour"] > best["dollars_per_hour"]
    assert "Prefill replicas of their own save" in said
    status, said = run(*arguments, "--no-split")
    assert status == 0, said
    assert json.loads(out.read_text())["plans"]["stock at its best"]["prefill"] is None


def test_speculation_is_on_the_page(trace, tmp_path):
    out = tmp_path / "plan.json"
    status, said = run(
        trace, "--format", "mooncake", *QUICK, "--slo", "ttft=2,tpot=0.009,attainment=0.9", "--gpus", "a100-80gb",
        "--speculation", "method=eagle3,model=a drafter,acceptance=0.8,draft=0.05", "--out", out,
    )  # fmt: skip
    assert status == 0, said
    record = json.loads(out.read_text())
    drafts = record["plans"]["stock at its best"]["flags"]["num_speculative_tokens"]
    assert drafts > 0
    assert f"Speculation with {drafts} draft tokens makes" in said
    assert "drafting one is taken to be 5.0% of a decode step" in said
    assert "--speculative-config" in said
    assert record["speculation"]["acceptance"] == 0.8


def test_statistics_of_clients_are_drawn_from(tmp_path):
    """Plan for ServeGen's clients as it publishes them, and as `import --statistics` writes them."""
    folder, file = write_servegen(tmp_path / "mm-image"), tmp_path / "clients.json"
    write_statistics(file, import_statistics(folder, TraceFormat.SERVEGEN))
    traces = [plan._trace(folder, TraceFormat.SERVEGEN), plan._trace(file, None)]
    assert traces[0] == traces[1]
    assert traces[0].header.source.startswith("drawn from statistics derived from servegen: mm-image, 2 clients")
    assert 3000 < traces[0].requests[-1].at < 3600
    assert {len(one.items) for one in traces[0].requests} >= {0, 1}
