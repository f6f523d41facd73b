"""Every bad option is an error that names it."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.arena import place
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport, meeting
from vllm_omni_sched.connectors.arena.options import Modality

POOL = {"block_bytes": 4096, "initial_bytes": 1 << 20, "max_bytes": 1 << 20}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"unknown": 1}, "unknown\n.*not permitted"),
    ({"directory": "relative"}, "directory\n.*must be absolute"),
    ({"directory": ""}, "directory\n.*must be absolute"),
    *(
        ({"arena": name}, "arena\n.*must be 1 to 64 letters")
        for name in ("", ".", "..", "a/b", "a\0", "é", "x" * 65, "a\n")
    ),
    ({"modality": "smell"}, "modality\n.*'text', 'image' or 'audio'"),
    ({"image": {**POOL, "block_bytes": 32}}, "image.block_bytes\n.*greater than or equal to 64"),
    ({"image": {**POOL, "block_bytes": 100}}, r"image\n.*block_bytes \(100\) must be a multiple of 64"),
    ({"image": {**POOL, "block_bytes": 1 << 21}}, r"image\n.*block_bytes .* fit into initial_bytes"),
    ({"audio": {**POOL, "initial_bytes": 10}}, "audio.initial_bytes\n"),
    (
        {"audio": {**POOL, "max_bytes": 1 << 19}},
        r"audio\n.*max_bytes \(524288\) must be at least initial_bytes \(1048576\)",
    ),
    ({"text": {**POOL, "inline_bytes": -1}}, "text.inline_bytes\n"),
    ({"text": {**POOL, "inline": 1}}, "text.inline\n.*not permitted"),
    ({"text": {"max_bytes": 1}}, "text.max_bytes\n.*greater than or equal to 65536"),
    *(({"growth_factor": factor}, "growth_factor\n") for factor in (1, 0, 4.1, float("nan"), float("inf"), "much")),
    *(({"ring_bytes": size}, "ring_bytes\n") for size in (0, 65535, 1.5, None)),
    *(({"ring_bytes": size}, "ring_bytes\n.*less than or equal to 1099511627776") for size in (1 << 63, 1 << 41)),
    *(
        ({"text": {**POOL, name: size}}, f"text.{name}\n.*less than or equal to 1099511627776")
        for name in ("block_bytes", "initial_bytes", "max_bytes", "inline_bytes")
        for size in (1 << 63, (1 << 40) + 64)
    ),
    ({"window_size": 1 << 63}, "window_size\n.*less than or equal to"),
    ({"max_inflight": 1 << 63}, "max_inflight\n.*less than or equal to"),
    *(({name: 1e300}, f"{name}\n.*less than or equal to") for name in ("put_timeout_seconds", "ttl_seconds")),
    *(({"max_messages": count}, "max_messages\n") for count in (63, (1 << 20) + 1)),
    *(({"max_inflight": count}, "max_inflight\n") for count in (0, -1)),
    ({"window_size": 0}, "window_size\n"),
    *(({"put_timeout_seconds": seconds}, "put_timeout_seconds\n") for seconds in (-1, float("nan"))),
    *(({"ttl_seconds": seconds}, "ttl_seconds\n") for seconds in (0, -1, float("nan"), float("inf"))),
    ({"copy_out": "perhaps"}, "copy_out\n"),
]


@pytest.mark.parametrize(("options", "what"), BAD, ids=range(len(BAD)))
def test_a_bad_option_is_named(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        ArenaOptions.model_validate(options)


def test_the_defaults_are_good_and_options_are_final() -> None:
    options = ArenaOptions()
    for modality in Modality:
        assert options.pool(modality) is getattr(options, modality.value)
    with pytest.raises(ValidationError):
        options.arena = "b"  # type: ignore[misc]


@pytest.mark.parametrize("arena", ["a", "A-1_b.c", "x" * 64, ".a"])
def test_names_of_arenas(arena: str) -> None:
    assert ArenaOptions(arena=arena).arena == arena


@pytest.mark.parametrize("named", ["../other", "a/b", "..", "x" * 200])
def test_an_arena_named_in_the_environment_is_checked_too(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.ARENA_VARIABLE, named)
    with (
        place() as root,
        pytest.raises(ConfigError, match=r"environment variable VLLM_OMNI_SCHED_ARENA must be 1 to 64"),
    ):
        ArenaTransport(ArenaOptions(directory=root))


def test_an_arena_has_its_name_from_the_options_or_the_environment_or_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = []
    with place() as root:
        for named, arena in (("", None), ("b", None), ("b", "c")):
            monkeypatch.setenv(meeting.ARENA_VARIABLE, named)
            path = ArenaTransport(ArenaOptions(directory=root, arena=arena))
            names.append(path.directory.name)
            path.close()
    assert names[0].startswith("pid-")
    assert names[1:] == ["b", "c"]
