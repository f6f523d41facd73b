"""`vllm-omni-sched plan`: its page, its files, and with which status it ends."""

import json
import random

import pytest
from typer.testing import CliRunner

from vllm_omni_sched.cli import app

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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slo", "ttft=fast"), "--slo 'ttft=fast': write it as ttft=2,itl=0.1,attainment=0.9"),
        (("--slo", "itl=0.1,tpot=0.1"), "tpot is given twice, or both itl and tpot"),
        (("--price", "h100-80gb=cheap"), "--price h100-80gb=cheap: write it as GPU=DOLLARS"),
        (("--gpus", "h100"), "unknown device 'h100': did you mean 'h100-80gb'?"),
        (("--model", "llama"), "unknown model 'llama'"),
        (("--weights", "fp4"), "--weights must be one of bf16, fp8, int4, got 'fp4'"),
        (("--scale", "0"), "--scale must be positive, got 0"),
        (("--calibration", "costs.json"), "--calibration needs --gpus with the one kind that was measured"),
        (("--model", "qwen2.5-vl-72b", "--max-gpus", "1"), "does not fit"),
        (("--slo", "ttft=0.001"), "no plan with up to 4 devices meets the SLO"),
    ],
)
def test_what_is_wrong_is_said(trace, arguments, said):
    status, text = run(trace, "--format", "mooncake", *QUICK, *arguments)
    assert status == 2
    assert said in text
