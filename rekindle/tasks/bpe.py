"""A byte-level BPE tokenizer learnt from texts: it starts from the 256 bytes, so every text has
tokens and comes back exactly as it was.

Unlike its WordPiece, the BPE learner of `tokenizers` breaks ties by token number, and numbers by
byte: the same texts give the same file in every process (tested)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
SMALLEST = 256 + len(SPECIAL_TOKENS)


def train_bpe(
    texts: Iterable[list[str]], *, vocab_size: int, min_frequency: int
) -> tokenizers.Tokenizer:
    """A tokenizer of at most `vocab_size` tokens, which is at least `SMALLEST`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
