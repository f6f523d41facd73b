"""Whatever a config.json has in a field that is read, there is a shape, or an error that tells what is wrong."""

import copy
import json
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sim.costs.test_config_json import LLAMA_8B, QWEN_VL
from tests.unit.sim.costs.test_families import PUBLISHED, QWEN3_OMNI, SCOUT_VISION, VARIANTS, WITH_TOWERS
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.config_json import shape_of
from vllm_omni_sched.sim.costs.configured.fields import Fields
from vllm_omni_sched.sim.costs.models import ModelShape

GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": {}}}
FORMATS = [
    {"quant_method": "compressed-tensors", "config_groups": GROUPS, "kv_cache_scheme": {"num_bits": 8}},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
    {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
    {"quant_method": "gptq", "bits": 4},
]
CONFIGS = [
    *(config for config, _ in PUBLISHED.values()),
    *({"vocab_size": 1000, "num_attention_heads": 32} | one for one in VARIANTS.values()),
    *WITH_TOWERS.values(),
    QWEN_VL,
    QWEN3_OMNI,
    SCOUT_VISION,
    *(LLAMA_8B | {"quantization_config": one} for one in FORMATS),
]


def tables(value, path=()):
    """Yield the path of each table of a configuration."""
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            yield from tables(inner, (*path, key))


def names_that_are_read():
    """Return the names of all fields that are read, as reading the configurations tells them."""
    found, original = set(), Fields.get

    def get(self, name):
        found.add(name)
        return original(self, name)

    with patch.object(Fields, "get", get):
        for config in CONFIGS:
            shape_of(config, "a model")
    return sorted(found)


NAMES = names_that_are_read()
NUMBERS = st.one_of(
    st.integers(-2, 70), st.integers(), st.floats(), st.sampled_from([0, 1, 10**9, 10**9 + 1, 10**400, 0.5, 4096.0])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), st.sampled_from(["full_attention", "fp8"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=8,
)  # fmt: skip


@st.composite
def changed(draw):
    """Return a configuration with some fields of its tables replaced, taken away or added."""
    config = copy.deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 3))):
        table = config
        for key in draw(st.sampled_from(list(tables(config)))):
            table = table[key]
        name = draw(st.sampled_from([*table, *NAMES]))
        if draw(st.booleans()) or draw(st.booleans()):
            table[name] = draw(VALUES)
        else:
            table.pop(name, None)
    return config


@given(changed())
def test_any_value_gives_a_shape_or_our_error(config):
    config = json.loads(json.dumps(config))
    try:
        shape = shape_of(config, "a model")
    except ConfigError as error:
        said = str(error)
    else:
        check(shape)
        return
    assert said.startswith("config.json")


def check(shape: ModelShape) -> None:
    llm = shape.llm
    assert llm.parameters > 0
    assert llm.kv_numbers_per_token(2) > 0
    assert llm.with_context(100_000.0).kv_numbers_per_token() > 0
    assert llm.operations_per_pair >= 0
    assert llm.operations_per_read > 0
    assert 0 <= llm.expert_share <= 1
    assert shape.weight_bytes(shape.precision.weights) > 0
    assert shape.max_model_len > 0
    assert shape.largest_item(shape.max_model_len) >= 0
    for encoding in shape.encodings.values():
        assert encoding.tower.parameters > 0
        assert encoding.tower.operations_per_embed > 0
        assert encoding.tower.operations_per_pair >= 0
        assert encoding.sequence_embeds is None or encoding.sequence_embeds > 0


def test_the_fields_of_all_kinds_of_models_are_tried():
    assert {"head_dim", "layer_types", "mlp_only_layers", "fullatt_block_indexes", "downsample_ratio", "patch_size",
            "sliding_window_pattern", "kv_lora_rank", "num_bits", "vision_feature_layer"} <= set(NAMES)  # fmt: skip
