"""A tiny byte-level BPE tokenizer, trained on the spot and written as checkpoints carry theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<eos>", "<s>")


def save_tokenizer(directory: Path, texts: Sequence[str], *, vocab_size: int = 330, words: bool = True) -> Path:
    """Writes a tokenizer that knows every byte, and what is frequent in `texts`. Returns the directory.

    Args:
        vocab_size: at least 256 bytes and the special tokens.
        words: tokens end at the edges of words, as usual; else they may span them.
    """
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(SPECIAL)
    )
    raw.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", bos_token="<s>").save_pretrained(str(directory))
    return directory
