"""The stated errors of costs are those of the newest results: the page of a plan and the documents share them."""

import json
from pathlib import Path

from typer.testing import CliRunner

from tests.unit.sim.costs.test_roofline import A100, LLAMA_7B, LLAMA_70B, pairs
from vllm_omni_sched.cli import app
from vllm_omni_sched.sim.costs import errors
from vllm_omni_sched.sim.costs.config_json import shape_of
from vllm_omni_sched.sim.costs.models import Precision, WeightFormat, model
from vllm_omni_sched.sim.costs.roofline import Parallel, RooflineCosts

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "benchmarks" / "results"


def percent(predicted, measured):
    return round(100 * (predicted / measured - 1))


def span(values):
    return errors.Range(min(values), max(values))


def test_the_back_tests_are_all_of_the_present_kind_of_calibration():
    found = [json.loads(path.read_text()) for path in RESULTS.glob("backtest*.json")]
    present = [one for one in found if "under_load" in one["provenance"].get("calibration", {})]
    assert max(found, key=lambda one: one["provenance"]["date"]) in present
    compared = [row for one in present for row in one["results"] if row["within"] is not None]
    for part, stated in errors.BACKTEST.items():
        rows = [row for row in compared if row["figure"].endswith(part)]
        off = [abs(row["off"]) for row in rows]
        assert stated.within == sum(row["within"] for row in rows) == sum(one <= stated.bar / 100 for one in off)
        assert (stated.number, stated.largest) == (len(rows), round(100 * max(off)))
        assert f"{stated.within} of {stated.number} values at {part} within {stated.bar} %" in errors.served_error()


def test_an_engine_alone_and_a_pipeline_are_as_far_off_as_their_results_say():
    for name, stated in (("sim_fidelity", errors.ENGINE_ALONE), ("sim_fidelity_pipeline", errors.PIPELINE)):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["results"]
        together = [row for row in rows if row["load"] is None and row.get("arrivals", "all") == "all"]
        off = {part: [abs(row["off"]) for row in together if row["measure"].endswith(part)] for part in stated}
        assert stated == {part: round(100 * max(values)) for part, values in off.items()}


def test_decoding_and_prompts_are_as_far_off_as_stated():
    def tokens_a_second(shape, devices):
        return 1 / RooflineCosts(shape, A100, devices).step_seconds(1, 100, 0, 0.0)

    def prompt(shape, devices, tokens):
        return RooflineCosts(shape, A100, devices).step_seconds(0, 0, tokens, pairs(tokens))

    published = {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43}
    decoding = [percent(tokens_a_second(LLAMA_7B, number), speed) for number, speed in published.items()]
    assert span(decoding) == errors.DECODING
    assert span([percent(tokens_a_second(LLAMA_70B, 8), 62.5)]) == errors.DECODING_70B
    long = [percent(prompt(LLAMA_7B, 1, 2048), 0.133), percent(prompt(LLAMA_70B, 4, 2048), 0.377)]
    assert span(long) == errors.LONG_PROMPTS
    short = [percent(prompt(LLAMA_7B, 1, 128), 0.016), percent(prompt(LLAMA_70B, 4, 128), 0.047)]
    assert span(short) == errors.SHORT_PROMPTS


def test_the_h200_is_as_far_off_as_its_result_says():
    """The simulation of the same load is run here; the measured times are those of the result file."""
    parts = json.loads((RESULTS / "gpu-nvidia-h200.json").read_text())["results"]["parts"]
    measured = {
        (row["variant"], row["measure"].removesuffix(", all rounds together")): row["median"] / 1e3
        for part in parts
        if part["part"] == "vllm"
        for row in part["results"]
    }
    scenario = ROOT / "benchmarks" / "studies" / "h200-mixed.toml"
    ran = CliRunner().invoke(app, ["simulate", str(scenario), "--json", "--quiet"], catch_exceptions=False)
    found = {one["variant"]: one["summary"] for one in json.loads(ran.stdout)["results"]}
    off = {name: [] for name in errors.H200}
    waits = []
    for variant, simulated in (("stock", found["stock"]), ("ours", found["chat"])):
        text, image = (simulated["by_modality"][name]["ttft_seconds"] for name in ("text", "image"))
        gaps = simulated["itl_seconds"]
        predicted = {
            "gap P50": ("text ITL P50", gaps["p50"]),
            "gap largest": ("text ITL max", gaps["largest"]),
            "TTFT of text P50": ("text TTFT P50", text["p50"]),
            "TTFT of text P99": ("text TTFT P99", text["p99"]),
            "TTFT of images P50": ("image TTFT P50", image["p50"]),
            "TTFT of images P99": ("image TTFT P99", image["p99"]),
        }
        for name, (figure, value) in predicted.items():
            off[name].append(percent(value, measured[variant, figure]))
        waits.append(round(1e3 * (measured[variant, "text TTFT P50"] - text["p50"])))
    assert {name: span(values) for name, values in off.items()} == errors.H200
    assert tuple(waits) == errors.TEXT_WAITS_MILLISECONDS


def test_what_no_measurement_backs_is_named():
    dense = model("qwen2.5-vl-7b")
    plain = errors.error_of(dense, Precision(), Parallel(8))
    assert "not known" not in plain
    assert f"TTFT of text by {errors.H200['TTFT of text P50'].text} at P50" in plain
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "intermediate_size": 18432,
        "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    deepseek = shape_of(config, "deepseek")
    said = errors.error_of(deepseek, Precision(WeightFormat.FP8, kv_fp8=True), Parallel(8, 2))
    assert said.startswith(plain)
    assert said.endswith(
        "This plan has routed experts, latent attention (MLA), fp8 weights, an FP8 KV cache, a pipeline: how far costs "
        "of these are off is not known."
    )


def test_an_engine_alone_does_not_get_the_errors_of_one_behind_its_server():
    alone, served = (errors.error_of(None, Precision(), Parallel(), served=served) for served in (False, True))
    assert (alone, served) == (errors.engine_error(), errors.served_error())
    assert f"up to {errors.ENGINE_ALONE['P50']} % at P50 and {errors.ENGINE_ALONE['P99']} % at P99" in alone
    assert f"{errors.BACKTEST['P50'].within} of {errors.BACKTEST['P50'].number}" not in alone


def test_the_documents_have_the_same_numbers():
    pages = {name: (ROOT / "docs" / "simulator" / f"{name}.md").read_text() for name in ("costs", "fidelity")}
    for low, high in (errors.H200[name] for name in ("TTFT of text P50", "TTFT of text P99", "gap largest")):
        for value in (low, high):
            assert f"| {value:+d} % |".replace("-", "\N{MINUS SIGN}") in pages["fidelity"]
    assert errors.H200["TTFT of text P50"].text.replace("-", "\N{MINUS SIGN}") in pages["costs"]
    stock, ours = errors.TEXT_WAITS_MILLISECONDS
    assert f"Text waits {stock} to {ours} ms more" in pages["fidelity"]
