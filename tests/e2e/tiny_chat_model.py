"""A tiny random Mixtral with a tokenizer of its own (byte-level BPE); its chat template reads a keyword, `tone`."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import transformers

from epruntime.testing import tiny_models

TEXT = ["The capital of France is Paris. Once upon a time there was a robot.", "Two plus two is four, said the cat."]
TEMPLATE = (
    "{% if tone %}{{ tone }}</s>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]


def save(directory: Path, *, seed: int = 0) -> Path:
    """Writes the checkpoint and returns its directory."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXT * 4, vocab_size=320, special_tokens=SPECIAL, show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(bpe.to_str()),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.chat_template = TEMPLATE
    _, model = tiny_models.build("mixtral", seed=seed, vocab_size=len(tokenizer))
    tiny_models.save(model, directory)
    tokenizer.save_pretrained(directory)
    return directory
