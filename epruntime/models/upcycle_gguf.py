"""GGUF checkpoints as a source for upcycling, read by the GGUF loader of transformers.

That loader dequantises the whole model to fp32 in memory: the peak is about twice the fp32 size of the dense model
(measured by `python -m epruntime.models.upcycle_gguf FILE`; docs/upcycling.md has the numbers).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models.upcycle_config import check_dense_config
from epruntime.models.upcycle_source import StateDictSource

#: The tensors of a Llama-like GGUF. Anything else would be dropped silently by the loader.
_KNOWN_TENSORS = re.compile(
    r"^(token_embd|output|output_norm|blk\.\d+\.(attn_norm|attn_q|attn_k|attn_v|attn_output|ffn_norm|ffn_gate|ffn_up|"
    r"ffn_down))\.weight$"
)


def load_gguf(path: Path) -> tuple[Any, StateDictSource, Any]:
    """Loads a GGUF file: (dense config, its tensors in fp32, its generation config).

    Raises:
        UnsupportedModelError: an architecture or a feature that would be lost on the way; gguf or accelerate absent.
        CheckpointError: the file is damaged.
    """
    eos_token_ids = _inspect(path)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path}: transformers cannot load it: {error}") from error
    config, generation = model.config, model.generation_config
    check_dense_config(config, str(path))
    if eos_token_ids:
        config.eos_token_id = generation.eos_token_id = eos_token_ids if len(eos_token_ids) > 1 else eos_token_ids[0]
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return config, StateDictSource(tensors), generation


def save_tokenizer(path: Path, out: Path) -> None:
    """Writes the GGUF's tokenizer and chat template to `out` in the form transformers loads.

    Raises:
        CheckpointError: transformers cannot build a tokenizer from the file.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path}: transformers cannot build its tokenizer: {error}") from error
    tokenizer.save_pretrained(out)


def _inspect(path: Path) -> list[int]:
    """Checks metadata and tensor names before anything large is read; returns the end-of-sequence ids."""
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401  (transformers needs it to load GGUF)
        import gguf
    except ImportError as error:
        raise UnsupportedModelError(
            f"{path}: reading GGUF needs the packages gguf and accelerate ({error}); install epruntime[gguf], or "
            "pip install gguf accelerate"
        ) from error
    try:
        reader = gguf.GGUFReader(path)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.ggml.") or name.endswith("_token_id")
        }
        names = [tensor.name for tensor in reader.tensors]
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"{path}: architecture {architecture!r} is not Llama-like; only 'llama' is read")
    if fields.get("llama.expert_count"):
        raise UnsupportedModelError(
            f"{path}: has {fields['llama.expert_count']} experts: it is a mixture of experts already"
        )
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise UnsupportedModelError(
            f"{path}: scales its rotary embedding ({scaling if scaling != 'none' else 'rope_freqs.weight'}), which the "
            "GGUF loader of transformers does not read; use the model's safetensors checkpoint"
        )
    for name in names:
        if not _KNOWN_TENSORS.match(name):
            raise UnsupportedModelError(f"{path}: tensor {name} is not part of a Llama-like model")
    # eot ends a chat turn where it differs from eos; a server that does not stop there answers itself.
    found = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def _measure(path: Path) -> None:
    import resource

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    import transformers.models.llama.modeling_llama  # noqa: F401  (its import is not the model's memory)

    before = peak()
    _, source, _ = load_gguf(path)
    fp32_gib = sum(info.num_elements for info in source.infos().values()) * 4 / 2**30
    print(f"{path.name}: fp32 size {fp32_gib:.2f} GiB, peak memory {peak():.2f} GiB, {before:.2f} GiB of it libraries")


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
