"""A factor by which everything takes longer under load is found from whole answers, whatever the load was."""

import json
import random

import pytest

from tests.unit.sim.costs.test_measured import FILE
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.fit import EncodePoint, Observations, ServedRequest, ServerStart
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.under_load import Served, under_load
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, write_trace

COSTS = {name: FILE[name] for name in FILE if name not in ("format", "version", "source", "kv_tokens")}
KV_TOKENS = 100_000
EMBEDS = 100
SERVER = Served({"max_num_seqs": 8, "max_num_batched_tokens": 512})
WITH_LANE = Served({**SERVER.stage, "lane_on": "beside", "lane_items": 2}, {"encode_ahead": True, "decode_pace": 0.0})


def served(folder, of, costs, seed):
    """Return what clients of a simulated server see, whose costs are those of the engine."""
    drawn = random.Random(seed)
    lines = [
        Exact(
            round(0.4 * number * drawn.random(), 6),
            drawn.randint(10, 100),
            drawn.randint(4, 40),
            (("image", EMBEDS),) * drawn.randint(0, 1),
        )
        for number in range(24)
    ]
    lines.sort(key=lambda line: line.at)
    write_trace(folder / "trace.jsonl", Header(FORMAT, VERSION), lines)
    (folder / "costs.json").write_text(json.dumps({**FILE, **costs, "kv_tokens": KV_TOKENS}))
    options = "".join(f"{name} = {json.dumps(value)}\n" for name, value in of.stage.items())
    policy = "".join(f"{name} = {json.dumps(value)}\n" for name, value in of.policy.items())
    (folder / "scenario.toml").write_text(
        f'name = "served"\nduration_seconds = 20.0\n[policy]\n{policy}'
        '[workload]\nkind = "trace"\nfile = "trace.jsonl"\n'
        f'[[stages]]\nkind = "engine"\nname = "llm"\ncalibration = "costs.json"\n{options}'
    )
    records = sorted(simulate(load(folder / "scenario.toml")).records, key=lambda record: record.number)
    seen = [
        ServedRequest(
            record.arrival,
            line.text_tokens + EMBEDS * len(line.items),
            "image" if line.items else "",
            len(line.items),
            line.output_tokens,
            record.end - record.arrival,
        )
        for line, record in zip(lines, records, strict=True)
    ]
    drawn.shuffle(seen)  # as they end
    return seen


def observed(folder, costs):
    def starts(of):
        return [ServerStart(mixed=[served(folder, of, costs, (number, part)[part]) for part in range(2)])
                for number in range(2)]  # fmt: skip

    encodes = [EncodePoint("image", 2, 2 * EMBEDS, 0.1)]
    return Observations(encodes=encodes, starts=starts(SERVER), lane_starts=starts(WITH_LANE))


@pytest.mark.parametrize(("server", "with_lane"), [(1.0, 1.0), (1.25, 1.1), (0.8, 1.4)])
def test_the_factor_of_each_server_is_found(tmp_path, server, with_lane):
    seen = observed(tmp_path, {"under_load": {"server": server, "with_lane": with_lane}})
    found = under_load(COSTS, KV_TOKENS, seen, SERVER, WITH_LANE)
    assert found == pytest.approx({"server": server, "with_lane": with_lane}, rel=0.02)


def test_requests_that_took_much_longer_than_the_others_do_not_count_more(tmp_path):
    seen = observed(tmp_path, {"under_load": {"server": 1.2}})
    slow = seen.starts[0].mixed[0]
    slow[:6] = [one._replace(seconds=20 * one.seconds) for one in slow[:6]]
    assert under_load(COSTS, KV_TOKENS, seen, SERVER, WITH_LANE)["server"] == pytest.approx(1.2, rel=0.04)


def test_only_servers_that_were_measured_have_a_factor(tmp_path):
    seen = observed(tmp_path, {})
    seen.lane_starts = []
    assert set(under_load(COSTS, KV_TOKENS, seen, SERVER, WITH_LANE)) == {"server"}
    assert under_load(COSTS, KV_TOKENS, Observations(), SERVER, WITH_LANE) == {}
    no_lane = COSTS | {"encode_in_lane": None}  # all items were encoded in steps
    assert set(under_load(no_lane, KV_TOKENS, observed(tmp_path, {}), SERVER, WITH_LANE)) == {"server"}


def test_an_option_that_the_simulator_does_not_know_is_named(tmp_path):
    with pytest.raises(ConfigError, match="encode_ahed"):
        under_load(COSTS, KV_TOKENS, observed(tmp_path, {}), Served(SERVER.stage, {"encode_ahed": True}), WITH_LANE)
