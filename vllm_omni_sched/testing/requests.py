"""Make small requests and multimodal items with contents that can be checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

END_TOKEN = 2
"""Stop token of every request of this module."""

PLACEHOLDER_TOKEN = 3
FIRST_TEXT_TOKEN = 100


def make_data(value: int = 0, *, num_values: int = 1) -> MultiModalKwargsItem:
    """Return the processed data of one item: `values`, int64 of shape `(num_values,)`, all equal to `value`.

    One more field is kept on the CPU, as in M-RoPE models.
    """
    return MultiModalKwargsItem(
        {
            "values": MultiModalFieldElem(
                data=torch.full((num_values,), value, dtype=torch.int64), field=MultiModalBatchedField()
            ),
            "grid": MultiModalFieldElem(
                data=torch.tensor([1, 1, num_values]), field=MultiModalBatchedField(keep_on_cpu=True)
            ),
        }
    )


def make_item(
    offset: int,
    length: int,
    mm_hash: str,
    *,
    data: MultiModalKwargsItem | int | None = 0,
    modality: str = "image",
    is_embed: Sequence[bool] | None = None,
) -> MultiModalFeatureSpec:
    """Return one item of `length` placeholder tokens from `offset` on.

    Offsets count from the start of the prompt (of the chunk, in a session update). An integer as `data` is short for
    `make_data(data)`; None is an item whose data the engine has already.
    `is_embed` has one entry per placeholder token; None means that all of them take an embedding.
    """
    mask = None if is_embed is None else torch.tensor(list(is_embed), dtype=torch.bool)
    if mask is not None and len(mask) != length:
        raise ValueError(f"is_embed has {len(mask)} entries for {length} placeholder tokens")
    return MultiModalFeatureSpec(
        data=make_data(data) if isinstance(data, int) else data,
        modality=modality,
        identifier=mm_hash,
        mm_position=PlaceholderRange(offset=offset, length=length, is_embed=mask),
        mm_hash=mm_hash,
    )


def make_request(
    request_id: str,
    num_tokens: int,
    items: Sequence[MultiModalFeatureSpec] = (),
    *,
    resumable: bool = False,
    max_tokens: int = 16,
    prompt_token_ids: Sequence[int] | None = None,
    block_size: int = 16,
    arrival_time: float = 0.0,
    priority: int = 0,
    ignore_eos: bool = False,
) -> Request:
    """Return a request of `num_tokens` prompt tokens: placeholders under the items, and text elsewhere.

    The text depends on the position only, so two prompts of equal length and items share their prefix blocks.
    `prompt_token_ids` overrides the tokens. `block_size` must be the scheduler's: it determines the block hashes.
    """
    if prompt_token_ids is None:
        prompt_token_ids = _prompt(num_tokens, items)
    if len(prompt_token_ids) != num_tokens:
        raise ValueError(f"{len(prompt_token_ids)} prompt tokens given, {num_tokens} announced")
    sampling_params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, stop_token_ids=[END_TOKEN], ignore_eos=ignore_eos
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling_params=sampling_params,
        pooling_params=None,
        arrival_time=arrival_time,
        mm_features=list(items) or None,
        priority=priority,
        block_hasher=_block_hasher(block_size),
        resumable=resumable,
    )


def make_session_update(
    request_id: str,
    num_tokens: int = 1,
    items: Sequence[MultiModalFeatureSpec] = (),
    *,
    last: bool = False,
    **options: Any,
) -> Request:
    """Return the next chunk of the session `request_id`, for `add_request`.

    Offsets of its items count from the start of the chunk. `last=True` ends the session instead: the chunk itself is
    ignored, as in vLLM.
    """
    return make_request(request_id, num_tokens, items, resumable=not last, **options)


def _prompt(num_tokens: int, items: Sequence[MultiModalFeatureSpec]) -> list[int]:
    tokens = [FIRST_TEXT_TOKEN + position % 997 for position in range(num_tokens)]
    for item in items:
        offset, length = item.mm_position.offset, item.mm_position.length
        if offset + length > num_tokens:
            raise ValueError(f"item at {offset}..{offset + length} lies outside a prompt of {num_tokens} tokens")
        tokens[offset : offset + length] = [PLACEHOLDER_TOKEN] * length
    return tokens


@cache
def _block_hasher(block_size: int) -> Any:
    _seed_block_hashes()
    # Not vLLM's default sha256: it pickles, so equal prompts hash alike only if equal strings are one object.
    return get_request_block_hasher(block_size, sha256_cbor)


@cache
def _seed_block_hashes() -> None:
    init_none_hash(sha256_cbor)
