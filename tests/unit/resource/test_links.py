"""Time that payloads take between hosts."""

from __future__ import annotations

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.pipeline.links import HERE, HostLinks

SOURCE, NEAR, FAR = (0, 0), (1, 0), (1, 1)


def links(**how: object) -> HostLinks:
    found = HostLinks(**how)  # type: ignore[arg-type]
    found.place(*FAR, "10.0.0.2")
    return found


def test_a_payload_takes_its_bytes_over_the_link() -> None:
    found = links(default=1e6)
    found.measured(0, 1, messages=4, nbytes=2_000_000)
    assert found.seconds(SOURCE, NEAR) == 0.0
    assert found.seconds(SOURCE, FAR) == pytest.approx(0.5)


def test_the_slower_of_the_two_links_counts() -> None:
    found = links(speeds={"10.0.0.2": 1e6, "10.0.0.3": 1e5}, default=1e9)
    found.place(*SOURCE, "10.0.0.3")
    found.measured(0, 1, messages=1, nbytes=1_000_000)
    assert found.seconds(SOURCE, FAR) == pytest.approx(10.0)
    assert found.seconds(SOURCE, NEAR) == pytest.approx(10.0)
    found.place(*FAR, "10.0.0.3")
    assert found.seconds(SOURCE, FAR) == 0.0


def test_the_size_is_the_mean_of_recent_messages_of_the_edge() -> None:
    found = links(default=1.0)
    assert found.payload_bytes(0, 1) == 0.0
    found.measured(0, 1, messages=2, nbytes=200)
    found.measured(1, 2, messages=1, nbytes=7)
    assert found.payload_bytes(0, 1) == 100.0
    for _ in range(60):
        found.measured(0, 1, messages=1, nbytes=1000)
    found.measured(0, 1, messages=0, nbytes=0)
    assert found.payload_bytes(0, 1) == pytest.approx(1000.0, rel=0.01)


def test_links_without_a_speed_cost_nothing() -> None:
    found = links()
    found.measured(0, 1, messages=1, nbytes=1_000_000)
    assert found.seconds(SOURCE, FAR) == 0.0
    assert not found.knows_speeds()
    assert links(speeds={"10.0.0.2": 1.0}).knows_speeds()


def test_a_replica_that_is_gone_is_forgotten() -> None:
    found = links(default=1.0)
    found.forget(*FAR)
    assert found.host(*FAR) == HERE


def test_a_speed_is_above_0() -> None:
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.2' must be above 0 bytes per second, got 0"):
        HostLinks({"10.0.0.2": 0})
    with pytest.raises(ConfigError, match="'default' must be above 0"):
        HostLinks(default=-1.0)


def test_distances_are_those_that_are_not_0() -> None:
    found = links(default=1e6)
    found.measured(0, 1, messages=1, nbytes=1_000_000)
    distances = found.distances(SOURCE, 1, (0, 1))
    assert dict(distances) == {1: 1.0}
    assert (len(distances), 0 in distances, distances.get(0, 5.0)) == (1, False, 5.0)
