"""Small scenarios have the results that they had: what makes the simulator faster must not change them."""

import hashlib
from pathlib import Path

import pytest

from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load

SCENARIO = """
name = "same"
seed = 1
duration_seconds = 12.0
[workload]
kind = "servegen-mm-image"
rate = {rate}
{more}
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
replicas = {replicas}
{stage}
"""
OURS = '[policy]\nwaiting_order = "sla"\nencode_ahead = true\n'
ALL = OURS + 'pieces = true\nbatch_control = "pid"\nprefill_control = "adaptive"\n'
DEATHS = '[[failures]]\nstage = "llm"\nkind = "replica"\nevery_seconds = 5.0\nrestart_seconds = 2.0\n'
CASES = {
    "stock": (10.0, "", 3, ""),
    "short of KV memory": (16.0, "", 1, "kv_tokens = 60000\nmax_num_seqs = 128\nlargest_item_embeds = 8192"),
    "ours": (10.0, OURS, 3, ""),
    "ours, short of KV memory": (8.0, OURS, 1, "kv_tokens = 60000"),
    "on shared processors": (6.0, OURS, 2, 'lane_on = "shared"'),
    "all policies": (10.0, ALL, 3, ""),
    "by cost": (10.0, "", 3, 'balance = "cost"'),
    "deaths": (10.0, OURS + DEATHS, 3, ""),
}
DIGESTS = {
    "stock": "66f32f55b9395260",
    "short of KV memory": "a5960ae76df66330",
    "ours": "8992de8a80c87da2",
    "ours, short of KV memory": "d51388310d01671e",
    "on shared processors": "f4df13af60584d94",
    "all policies": "f47aae0c17e64f8b",
    "by cost": "db74420c8973d793",
    "deaths": "6bb90eb7f21ffe40",
}


@pytest.mark.parametrize("case", CASES)
def test_records_and_gaps_are_those_of_before(case: str, tmp_path: Path) -> None:
    rate, more, replicas, stage = CASES[case]
    file = tmp_path / "scenario.toml"
    file.write_text(SCENARIO.format(rate=rate, more=more, replicas=replicas, stage=stage))
    result = simulate(load(file))
    # nine digits: the last ones are the processor's
    lines = [f"{one.number} {one.first:.9g} {one.end:.9g} {one.largest_gap:.9g}" for one in result.records]
    lines += [f"{result.gaps.total:.9g} {result.gaps.count:.0f}", str(sorted(result.counters.items()))]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == DIGESTS[case]
