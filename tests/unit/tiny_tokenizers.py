"""Tokenizers made in a moment: byte-level and byte-fallback BPE, with and without a BOS of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["The capital of France is Paris. Once upon a time there was a robot.", "Two plus two is four,   said the cat."]
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>"]
#: writes BOS itself, as Llama's do
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}</s>{% endfor %}"


def byte_level(*, adds_bos: bool = True, **added: Any) -> tokenizers.Tokenizer:
    """GPT-2's kind. `added`: options of one more added token, <tag>."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT * 4, trainer)
    if added:
        made.add_tokens([tokenizers.AddedToken("<tag>", **added)])
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def byte_fallback(*, normalizer: Any = None, **options: Any) -> tokenizers.Tokenizer:
    """Llama 2's kind: spaces become ▁, characters that are no token become bytes."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "abc", "▁▁", "▁▁▁▁"]
    vocabulary |= {piece: len(vocabulary) + i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("ab", "c"), ("▁", "▁"), ("▁▁", "▁▁")]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, **{"byte_fallback": True, "fuse_unk": True} | options))
    made.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def save(made: tokenizers.Tokenizer, directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """Writes the files that AutoTokenizer reads."""
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    hf.chat_template = template
    hf.save_pretrained(directory)
    return directory
