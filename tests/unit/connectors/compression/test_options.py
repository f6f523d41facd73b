"""Options of compression are strict, and lossy codecs belong to edges."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.connectors.compression.options import CompressionOptions, Lossy, Mode


def test_defaults_lose_nothing():
    options = read_options(CompressionOptions, {}, "compression")
    assert (options.mode, options.cache_bytes, options.edges) == (Mode.AUTO, 0, {})
    assert options.of_edge("0->1").lossy is None


def test_an_edge_says_what_it_does_differently():
    options = read_options(
        CompressionOptions,
        {
            "mode": "always",
            "min_bytes": 7,
            "edges": {"0->1": {"lossy": "int8", "mode": False}, "a->b": {"min_bytes": 0}},
        },
        "compression",
    )
    assert options.edges["0->1"].lossy is Lossy.INT8
    first, second, other = (options.of_edge(edge) for edge in ("0->1", "a->b", "1->2"))
    assert (first.mode, first.lossy, first.min_bytes) == (Mode.OFF, "int8", 7)
    assert (second.mode, second.lossy, second.min_bytes) == (Mode.ALWAYS, None, 0)
    assert (other.mode, other.lossy, other.min_bytes) == (Mode.ALWAYS, None, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mod": "auto"}, r"unknown option 'mod'; did you mean 'mode'\?"),
        ({"mode": "fast"}, r"'mode' must be one of \['off', 'auto', 'always'\], got 'fast'"),
        ({"min_bytes": -1}, "'min_bytes': input should be greater than or equal to 0, got -1"),
        ({"min_bytes": 1.5}, "'min_bytes'"),
        ({"lossy": "int8"}, "unknown option 'lossy'; known options: .*edges"),
        (
            {"edges": {"0->1": {"lossy": "int4"}}},
            r"'edges.0->1.lossy' must be one of \['none', 'int8', 'mulaw'\]",
        ),
        (
            {"edges": {"0->1": {"lossi": "int8"}}},
            r"unknown option 'edges.0->1.lossi'; did you mean 'edges.0->1.lossy'\?",
        ),
        ({"edges": {"0-1": {}}}, "an edge is written 'from_stage->to_stage', such as '0->1', got '0-1'"),
        ({"edges": {"0->1": 3}}, "'edges.0->1'"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=f"^compression: .*{message}"):
        read_options(CompressionOptions, options, "compression")
