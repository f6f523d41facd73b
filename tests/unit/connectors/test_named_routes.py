"""Several connectors in the options become routes of one: the file of the design article, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.arena import EDGE, pixels, place
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_yaml import VARIABLE, load_stage_config, read_stage_options
from vllm_omni_sched.connectors.arena.options import Modality
from vllm_omni_sched.connectors.auto import AutoOptions, auto_transport
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.named_routes import EdgeConnector, resolved_connectors

ARTICLE = Path(__file__).parents[2] / "support" / "article.yaml"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SHM, ARENA, AUTO, STORE = "SharedMemoryConnector", "ArenaConnector", "OmniAutoConnector", "MooncakeConnector"


def resolved(connectors: dict[str, Any], **options: Any) -> dict[str, EdgeConnector]:
    runtime = {"connectors": connectors} | options.pop("runtime", {})
    return resolved_connectors(read_stage_options({"runtime": runtime, **options}, "here"))


def only(connectors: dict[str, Any], **options: Any) -> EdgeConnector:
    (found,) = resolved(connectors, **options).values()
    return found


def shm(threshold: Any = None, **extra: Any) -> dict[str, Any]:
    return {"name": SHM, "extra": extra | ({} if threshold is None else {"shm_threshold_bytes": threshold})}


def inline(found: EdgeConnector) -> list[int]:
    arena = AutoOptions(**found.extra).arena
    assert arena is not None
    return [arena.pool(modality).inline_bytes for modality in (Modality.TEXT, Modality.IMAGE, Modality.AUDIO)]


def ids(nbytes: int) -> dict[str, Any]:
    return {"ids": np.zeros(nbytes // 8, np.int64)}


def article() -> EdgeConnector:
    config = load_stage_config(None, {VARIABLE: str(ARTICLE)})
    assert config is not None
    (found,) = resolved_connectors(config).values()
    return found


def test_the_file_of_the_design_article_is_one_connector_with_three_routes() -> None:
    found = article()
    options = AutoOptions(**found.extra)
    assert found.name == AUTO
    assert options.arena is not None
    assert options.mooncake is not None
    assert inline(found) == [32 * KIB, 1 * MIB, 64 * KIB]  # for audio, vLLM-Omni's default
    pools = [options.arena.text, options.arena.image, options.arena.audio]
    assert [pool.initial_bytes for pool in pools] == [256 * MIB, 2 * GIB, 512 * MIB]
    assert [pool.max_bytes for pool in pools] == [1 * GIB, 8 * GIB, 2 * GIB]
    assert options.arena.growth_factor == 1.5
    assert options.arena.ring_bytes == 16 * MIB  # else hardly an image would go inline
    store = options.mooncake
    assert (store.host, store.metadata_server) == ("192.168.1.100", "http://master:8080/metadata")
    assert (store.master, store.proto, store.segment, store.localbuf) == ("master:50051", "tcp", 512 * MIB, 64 * MIB)
    assert [(route.name, route.carries) for route in found.routes] == [
        ("connector_small", "text to stages on this host"),
        ("connector_large", "image to stages on this host"),
        ("", "audio to stages on this host"),
        ("connector_distributed", "all messages to stages on other hosts"),
    ]
    small = found.routes[0].values
    assert (small["inline_up_to_bytes"], small["tuned_from_bytes"], small["tuned_to_bytes"]) == (32768, 8192, 1 << 20)


def test_small_messages_go_inline_and_large_ones_through_the_pool_of_their_modality() -> None:
    with place() as root:
        arena = {**article().extra["arena"], "directory": str(root), "arena": "article"}
        for modality in ("text", "image", "audio"):  # of a size that tests may use
            arena[modality] = {**arena[modality], "initial_bytes": 1 * MIB, "max_bytes": 16 * MIB}
        transport = auto_transport(AutoOptions(arena=arena))
        sent = {"text 30": ids(30 * KIB), "text 60": ids(60 * KIB), "image 900": pixels(1, 900 * KIB)}
        sent["image 2000"] = pixels(1, 2000 * KIB)
        through = {}
        for key, payload in sent.items():
            before = transport.health().facts["arena"].get("inline", 0)
            transport.put(make_message(EDGE, key, payload))
            through[key] = transport.health().facts["arena"]["inline"] - before
        pools = transport.health().facts["arena"]["pools"]
        transport.close()
    assert through == {"text 30": 1, "text 60": 0, "image 900": 1, "image 2000": 0}
    assert set(pools) == {"text", "image"}


@pytest.mark.parametrize(
    ("connectors", "sizes"),
    [
        ({"a": shm(1 * MIB), "b": shm("32KB")}, [32 * KIB, 1 * MIB, 64 * KIB]),  # in any order
        ({"a": shm(3), "b": shm(2), "c": shm(1)}, [1, 3, 2]),
        ({"a": shm(3, modality="text"), "b": shm(2), "c": shm(1)}, [3, 2, 1]),
        ({"a": shm(3, modality="audio"), "b": shm(2)}, [2, 64 * KIB, 3]),
        ({"a": shm(7), "far": {"name": STORE}}, [7, 7, 7]),  # one for all
        ({"a": shm(7, modality="image"), "far": {"name": STORE}}, [64 * KIB, 7, 64 * KIB]),
        ({"a": shm(), "b": shm(1 * MIB)}, [64 * KIB, 1 * MIB, 64 * KIB]),  # vLLM-Omni's default
    ],
)
def test_thresholds_are_for_modalities(connectors: dict[str, Any], sizes: list[int]) -> None:
    assert inline(only(connectors)) == sizes


def test_other_connectors_are_routes_too() -> None:
    connectors = {
        "near": {"name": ARENA, "extra": {"ring_bytes": 1 * MIB, "stall_seconds": 3, "codec_chunk_frames": 25}},
        "far": {"name": "MooncakePoolConnector", "extra": {"segment": "16MB", "codec_chunk_frames": 25}},
        "other": {"name": "NixlConnector", "extra": {"a": 1}},
    }
    found = only(connectors, pools={"text_pool_size": "1MB"})
    assert found.extra["arena"] == {"ring_bytes": MIB, "text": {"initial_bytes": MIB, "max_bytes": 4 * MIB}}
    assert found.extra["mooncake"] == {"segment": "16MB"}
    assert found.extra["foreign"] == {"other": {"name": "NixlConnector", "extra": {"a": 1}}}
    assert (found.extra["stall_seconds"], found.extra["codec_chunk_frames"]) == (3, 25)  # of the connector as a whole
    assert [route.name for route in found.routes] == ["near", "near", "near", "far", "other"]


def test_routes_between_hosts_alone_have_no_shared_memory() -> None:
    found = only({"a": {"name": STORE}, "b": {"name": "NixlConnector"}})
    assert found.extra["arena"] is None
    assert [route.carries for route in found.routes] == [
        "all messages to all stages",
        "all messages to stages on other hosts",
    ]


def test_one_connector_and_named_edges_stay_what_they_are() -> None:
    assert only({"a": {"name": STORE, "extra": {"host": "h"}}}) == EdgeConnector(STORE, {"host": "h"})
    both = {"a": shm(3), "b": {"name": ARENA, "extra": {}}}
    named = resolved(both, runtime={"edges": {"0->1": "a", "2->3": "b"}})
    assert named == {"a": EdgeConnector(SHM, {"shm_threshold_bytes": 3}), "b": EdgeConnector(ARENA, {})}
    assert resolved({}) == {}


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ({"name": ARENA}, {"audio": {"initial_bytes": 1 * MIB, "max_bytes": 4 * MIB}, "growth_factor": 2.0}),
        (
            {"name": AUTO, "extra": {"arena": {"audio": {"max_bytes": 2 * MIB}}}},
            {"arena": {"audio": {"initial_bytes": 1 * MIB, "max_bytes": 2 * MIB}, "growth_factor": 2.0}},
        ),
    ],
)
def test_pools_of_a_single_connector_have_the_sizes(connector: dict[str, Any], extra: dict[str, Any]) -> None:
    assert only({"a": connector}, audio_pool_size="1MB", pool_growth_factor=2.0).extra == extra


@pytest.mark.parametrize(
    ("connectors", "options", "says"),
    [
        (
            {"a": shm(1), "b": shm(2), "c": shm(3), "d": shm(4)},
            {},
            "'runtime.connectors.d': there are 4 .* remove some",
        ),
        (
            {"a": shm(1, modality="text"), "b": shm(2, modality="text")},
            {},
            r"connectors\.a' and .*\.b' are both for text",
        ),
        (
            {"a": shm(1, modality="txt"), "b": shm()},
            {},
            r"a\.extra\.modality' must be one of .*, got 'txt'; did you mean 'text'",
        ),
        ({"a": shm("1 mile"), "b": shm()}, {}, r"\.a\.extra\.shm_threshold_bytes': '1 mile' is not a size"),
        ({"a": shm(-1), "b": shm()}, {}, r"\.a\.extra\.shm_threshold_bytes': .*the nearest valid value is 0"),
        ({"a": shm(shm_threshold_byte=1), "b": shm()}, {}, r"a\.extra\.shm_threshold_byte'; did you mean .*_bytes'\?"),
        ({"a": {"name": STORE, "extra": {"segmnt": 1}}, "b": shm()}, {}, r"did you mean '.*\.a\.extra\.segment'\?"),
        ({"a": {"name": STORE, "extra": {"master": "x"}}, "b": shm()}, {}, r"\.a\.extra\.master': 'x' is no address"),
        (
            {"a": {"name": STORE}, "b": {"name": STORE}},
            {},
            r"\.a' and '.*\.b' are each the Mooncake store .*: keep one",
        ),
        ({"a": {"name": ARENA}, "b": {"name": ARENA}}, {}, r"\.a' and '.*\.b' are each the arena .*: keep one"),
        ({"a": {"name": ARENA}, "b": shm()}, {}, r"\.a' and '.*\.b' are the same shared memory: keep"),
        ({"a": {"name": AUTO}, "b": shm()}, {}, r"'runtime\.connectors\.a\.name': .* cannot be one of several routes"),
        (
            {"a": shm(stall_seconds=1), "b": shm(stall_seconds=2)},
            {},
            r"\.a\.extra\.stall_seconds' and .* the same value",
        ),
        (
            {"a": {"name": ARENA, "extra": {"growth_factor": 2}}},
            {"pool_growth_factor": 2.0},
            r"'pools\.pool_growth_factor' and 'runtime\.connectors\.a\.extra\.growth_factor' are the same: keep one",
        ),
        (
            {"a": {"name": AUTO, "extra": {"arena": {"text": {"initial_bytes": 1 << 20}}}}},
            {"text_pool_size": "1MB"},
            r"'pools\.text_pool_size' and '.*\.extra\.arena\.text\.initial_bytes' are the same: keep one",
        ),
        (
            {"a": {"name": ARENA, "extra": {"text": {"max_bytes": 1 << 20}}}},
            {"text_pool_size": "2MB"},
            r"'pools\.text_pool_size' \(2097152\) must not be above '.*\.extra\.text\.max_bytes' \(1048576\): lower",
        ),
        (
            {"a": {"name": AUTO, "extra": {"arena": None}}},
            {"text_pool_size": "1MB"},
            r"\.a\.extra\.arena' must be a mapp",
        ),
        ({"a": {"name": SHM}}, {"text_pool_size": "1MB"}, r"'pools\.text_pool_size' is for .*: add one, such as"),
        ({}, {"pool_growth_factor": 2.0}, r"'pools\.pool_growth_factor' is for .*: add one, .* or remove the option"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_its_key(
    connectors: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(connectors, **options)
