"""So many requests are here at all times; and runs as long as so many requests take."""

from pathlib import Path

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.scenario.scenario import Scenario

CLOSED = """
name = "closed"
seed = 2
duration_seconds = 400.0
warm_up_seconds = 50.0
[workload]
kind = "poisson"
rate = 5.0
concurrency = {concurrency}
[[stages]]
name = "servers"
kind = "servers"
per_replica = {servers}
seconds = {seconds}
"""


def scenario(tmp_path: Path, text: str, **values: object) -> Scenario:
    path = tmp_path / "one.toml"
    path.write_text(text.format(**values))
    return load(path)


def test_as_many_are_here_at_all_times(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path, CLOSED, concurrency=7, servers=3, seconds=0.5))
    stays = [(one.arrival, one.end) for one in result.records]
    assert {sum(begin <= at + 0.01 < end for begin, end in stays) for at in range(60, 390, 10)} == {7}
    # three servers that are never idle, half a second each
    assert len(result.records) == pytest.approx(6 * 350, rel=0.01)
    # Little's law: 7 requests here, 6 of which leave each second
    assert result.summary()["latency_seconds"]["mean"] == pytest.approx(7 / 6, rel=0.01)


def test_none_comes_after_the_end(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path, CLOSED, concurrency=2, servers=2, seconds=3.0))
    assert max(record.arrival for record in result.records) < 400
    assert result.lost == 0
    assert result.seconds < 410


def test_an_exponential_server_has_the_throughput_of_a_closed_network(tmp_path: Path) -> None:
    seconds = '0.25\nservice = "exponential"'
    result = simulate(scenario(tmp_path, CLOSED, concurrency=1, servers=1, seconds=seconds))
    assert result.summary()["requests_per_second"] == pytest.approx(4.0, rel=0.06)


OPEN = """
name = "open"
requests = {requests}
duration_seconds = 7.0
warm_up_seconds = 20.0
[workload]
kind = "poisson"
rate = {rate}
[[stages]]
name = "servers"
kind = "servers"
per_replica = 4
seconds = 0.01
"""


@pytest.mark.parametrize("rate", [5.0, 50.0])
def test_a_run_is_as_long_as_its_requests_take(tmp_path: Path, rate: float) -> None:
    one = scenario(tmp_path, OPEN, requests=2000, rate=rate)
    assert one.duration_seconds == 20.0 + 2000 / rate
    assert len(simulate(one).records) == pytest.approx(2000, abs=3 * 2000**0.5)


def test_requests_need_a_rate_and_no_closed_loop(tmp_path: Path) -> None:
    closed = OPEN.replace("[[stages]]", "concurrency = 3\n[[stages]]")
    with pytest.raises(ConfigError, match=r"'requests' and 'workload\.concurrency' are both set"):
        scenario(tmp_path, closed, requests=10, rate=1.0)
