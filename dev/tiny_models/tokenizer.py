"""The tokenizer of the tiny models: every id is printable."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from typing import Any

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<image>")


def readable_tokenizer(special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Any:
    """Make a tokenizer with an id per printable character and made-up words: a random model's output can be read.

    Text is split into characters (one outside ASCII becomes `<unk>`); the words only ever come out, never go in.
    The first four of `special_tokens` are those of text.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    made_up = (f" {first}{second}" for first, second in itertools.product(syllables, syllables[::-3]))
    words = itertools.islice(made_up, VOCAB_SIZE - len(special_tokens) - len(characters))
    vocab = {token: id_ for id_, token in enumerate([*special_tokens, *characters, *words])}
    assert len(vocab) == VOCAB_SIZE

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(special_tokens[4:]),
        clean_up_tokenization_spaces=False,
    )
