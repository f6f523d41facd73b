"""Compute parameters, operations and bytes from the shape of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from vllm_omni_sched.sim.costs.base import Source
from vllm_omni_sched.sim.costs.largest import LargestItem, no_items

BF16_BYTES = 2


@dataclass(frozen=True)
class LlmShape:
    """A decoder with grouped-query attention and a gated MLP, like those of Llama and Qwen2."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 128
    qkv_bias: bool = False
    tied: bool = False  # the embedding is also the output matrix

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers, by which each token is multiplied."""
        query, keys = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + keys) + (query + keys if self.qkv_bias else 0)
        return self.layers * (attention + 3 * self.hidden * self.ffn + 2 * self.hidden) + self.hidden

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the output matrix, by which each sampled token is multiplied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def operations_per_pair(self) -> int:
        """Return the operations of attention for one query and one key in all layers, for score and value."""
        return 4 * self.layers * self.heads * self.head_dim

    def kv_bytes_per_token(self, tensor_parallel: int = 1) -> int:
        """Return the KV bytes of a token on all devices together; a device holds at least one key head."""
        return 2 * BF16_BYTES * self.layers * max(self.kv_heads, tensor_parallel) * self.head_dim


@dataclass(frozen=True)
class TowerShape:
    """An encoder of images or audio, with the projector of its output to the LLM.

    ``patches_per_embed``: how many of its positions become one embedding. ``patch_inputs``: numbers in a patch.
    ``window_patches``: patches that a position sees in layers other than the ``full_layers`` (None: all are full).
    ``projector``: widths of the final MLP. ``other_parameters``: position table, convolutions.
    """

    layers: int
    hidden: int
    ffn: int
    patches_per_embed: int
    patch_inputs: int
    projector: tuple[int, ...]
    gated: bool = False
    full_layers: int | None = None
    window_patches: int = 0
    other_parameters: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of all parameters, including the projector."""
        patches = self.patch_inputs * self.hidden
        return self.layers * self._layer_parameters + patches + self._projector_parameters + self.other_parameters

    @property
    def _projector_parameters(self) -> int:
        return sum((width + 1) * after for width, after in pairwise(self.projector))

    @property
    def _layer_parameters(self) -> int:
        matrices = 3 if self.gated else 2
        weights = 4 * self.hidden**2 + matrices * self.hidden * self.ffn
        return weights + 7 * self.hidden + (matrices - 1) * self.ffn  # biases, and the scales of two norms

    @property
    def _full_layers(self) -> int:
        return self.layers if self.full_layers is None else self.full_layers

    @property
    def operations_per_embed(self) -> float:
        """Return the operations per embedding without those that grow with the sequence."""
        per_patch = 2 * (self.layers * self._layer_parameters + self.patch_inputs * self.hidden)
        per_patch += 4 * (self.layers - self._full_layers) * self.hidden * self.window_patches
        return float(self.patches_per_embed * per_patch + 2 * self._projector_parameters)

    @property
    def operations_per_pair(self) -> float:
        """Return the operations of full attention for each pair of embeddings that see each other."""
        return 4.0 * self._full_layers * self.hidden * self.patches_per_embed**2


@dataclass(frozen=True)
class Encoding:
    """Encoding of items of one modality by a tower.

    ``sequence_embeds``: number of embeddings that a position sees: a tile, or a frame of a video; None: its whole
    item. ``frontend_seconds_per_embed``: CPU core time to prepare the input of one embedding.
    """

    tower: TowerShape
    frontend_seconds_per_embed: float
    sequence_embeds: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """An LLM with the encodings of its modalities.

    ``published_parameters``: the value on its card. ``max_model_len``: tokens of its context,
    from its configuration. ``largest_item``: embeddings of its largest item, if it accepts items.
    """

    name: str
    llm: LlmShape
    encodings: Mapping[str, Encoding]
    published_parameters: int
    source: Source
    max_model_len: int = 32768
    largest_item: LargestItem = no_items

    @property
    def parameters(self) -> int:
        """Return the parameters of the LLM, and of each tower once, even if several modalities share it."""
        towers = {encoding.tower for encoding in self.encodings.values()}
        return self.llm.parameters + sum(tower.parameters for tower in towers)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in bf16."""
        return BF16_BYTES * self.parameters
