"""Compute what costs need to know of a decoder from its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's attention: keys and values of a token are one latent vector, which all heads share.

    ``query_rank``: 0 if queries are not compressed. ``nope``, ``rope``, ``value``: widths of a head, without and with
    positions, and of a value.
    """

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """Routed experts: ``number`` of width ``ffn`` in each of ``layers``, of which a token goes through ``chosen``.

    ``shared_ffn``: width of what every token goes through beside them. ``biased``: their matrices have biases.
    """

    layers: int
    number: int
    chosen: int
    ffn: int
    shared_ffn: int = 0
    biased: bool = False


@dataclass(frozen=True)
class ConfiguredLlm:
    """A decoder as its ``config.json`` has it; an `Llm`.

    ``matrices``: of an MLP, 3 with a gate and 2 without. ``vectors``: numbers in the biases and scales of a layer;
    ``last_vectors``: in those after the layers. ``sliding_layers``: layers that see a ``window`` of tokens alone.
    ``window_share``: the fraction of a context that their KV cache holds; 1 until `with_context` is told how long
    contexts are.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    matrices: int = 3
    vectors: int = 0
    last_vectors: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    sliding_layers: int = 0
    window: int = 0
    window_share: float = 1.0

    @property
    def _attention(self) -> int:
        hidden, latent = self.hidden, self.latent
        if latent is not None:
            width = self.heads * (latent.nope + latent.rope)
            queries = latent.query_rank * (hidden + width + 1) if latent.query_rank else hidden * width
            keys = hidden * (latent.kv_rank + latent.rope) + latent.kv_rank
            values = latent.kv_rank * self.heads * (latent.nope + latent.value)
            return queries + keys + values + self.heads * latent.value * hidden
        return 2 * hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def _outside_experts(self) -> int:
        dense = self.layers - (self.experts.layers if self.experts is not None else 0)
        found = self.layers * (self._attention + self.vectors) + self.last_vectors
        found += dense * self.matrices * self.hidden * self.ffn
        if self.experts is not None:
            each = self.hidden * (self.experts.number + self.matrices * self.experts.shared_ffn)
            found += self.experts.layers * each
        return found

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all routed experts."""
        one = self.experts
        if one is None:
            return 0
        each = self.matrices * self.hidden * one.ffn
        each += (self.matrices - 1) * one.ffn + self.hidden if one.biased else 0
        return one.layers * one.number * each

    @property
    def expert_share(self) -> float:
        """Return the fraction of the routed experts that a token goes through."""
        return 0.0 if self.experts is None else self.experts.chosen / self.experts.number

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers by which each token is multiplied."""
        return self._outside_experts + round(self.expert_parameters * self.expert_share)

    @property
    def stored_parameters(self) -> int:
        """Return the parameters of all layers."""
        return self._outside_experts + self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the output matrix, by which each sampled token is multiplied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.stored_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token goes through, with embedding and output matrix."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def _full_layers(self) -> float:
        """Return the layers with full attention that need as much as all layers do."""
        return self.layers - self.sliding_layers * (1.0 - self.window_share)

    @property
    def operations_per_pair(self) -> int:
        """Return the operations of attention for one query and one key in all layers, for score and value."""
        if self.latent is not None:
            return 2 * self.layers * self.heads * (self.latent.nope + self.latent.rope + self.latent.value)
        return round(4 * self._full_layers * self.heads * self.head_dim)

    @property
    def operations_per_read(self) -> float:
        """Return the operations for a pair of a decoding request, relative to a prompt's.

        With latent attention it works on the latent vectors themselves, whose products are wider.
        """
        if self.latent is None:
            return 1.0
        decode = 2 * self.layers * self.heads * (2 * self.latent.kv_rank + self.latent.rope)
        return decode / self.operations_per_pair

    def kv_numbers_per_token(self, tensor_parallel: int = 1) -> float:
        """Return the numbers in the KV cache of a token on all devices together; each has the whole latent vector."""
        if self.latent is not None:
            return float(self.layers * (self.latent.kv_rank + self.latent.rope) * tensor_parallel)
        return 2 * self._full_layers * max(self.kv_heads, tensor_parallel) * self.head_dim

    def with_context(self, tokens: float) -> ConfiguredLlm:
        """Return the decoder for contexts of so many tokens on average, of which windows hold a part."""
        if not self.sliding_layers or tokens <= self.window:
            return self
        return replace(self, window_share=self.window / tokens)
