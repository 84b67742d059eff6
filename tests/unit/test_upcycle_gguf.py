"""Upcycling from GGUF: equal to the model that the file was made from; what its loader would drop is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models.upcycle import upcycle

gguf = pytest.importorskip("gguf", reason="needs the gguf extra")
pytest.importorskip("accelerate", reason="needs the gguf extra")

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
TEXT = ["the quick brown fox jumps over the lazy dog 0123456789", "héllo wörld 你好, and so on and on"]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2


def trained_tokenizer() -> tokenizers.Tokenizer:
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXT * 4, vocab_size=300, special_tokens=["<s>", "</s>", "<eot>"], show_progress=False)
    return bpe


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two halves of a rotated pair side by side; transformers half a head apart."""
    return weight.view(heads, 2, HEAD_DIM // 2, HIDDEN).transpose(1, 2).reshape(heads * HEAD_DIM, HIDDEN)


def write_gguf(
    path: Path,
    *,
    extra_tensors: dict[str, np.ndarray] | None = None,
    arch: str = "llama",
    scaling: str | None = None,
    experts: int = 0,
    eot: int | None = None,
) -> Any:
    """Writes a tiny random model in fp32 and returns it as transformers holds it."""
    bpe = trained_tokenizer()
    vocab = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(vocab),
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=128,
            initializer_range=0.3,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )
    )
    model.eval()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    if scaling:
        writer.add_string(f"{arch}.rope.scaling.type", scaling)
    if experts:
        writer.add_expert_count(experts)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in ("<s>", "</s>", "<eot>") else 1 for token, _ in vocab])
    merges = json.loads(bpe.to_str())["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if eot is not None:
        writer.add_eot_token_id(eot)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            kind = ".".join(parts[3:-1])
            if kind in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = interleave(tensor, HEADS if "q_proj" in kind else KV_HEADS)
            target = f"blk.{parts[2]}.{names[kind]}.weight"
        else:
            target = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        writer.add_tensor(target, tensor.numpy())
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_gguf_equals_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", eot=2)
    report = upcycle(tmp_path / "tiny.gguf", tmp_path / "moe", num_experts=4, top_k=2)
    assert (report.source, report.dtype) == ("gguf", "float32")
    moe, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert not any(info.values()), info
    assert moe.generation_config.eos_token_id == [1, 2], "the end of a turn must end an answer"
    ids = torch.tensor([[5, 17, 40, 41, 3, 99, 120]])
    with torch.inference_mode():
        torch.testing.assert_close(moe(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-4)
        expected = model.generate(
            ids, max_new_tokens=16, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
        )
        margin = min(float(best[0] - best[1]) for best in (step[0].topk(2).values for step in expected.logits))
        assert margin > 1e-3
        got = moe.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert got.tolist() == expected.sequences.tolist()


def test_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    upcycle(tmp_path, tmp_path / "moe", num_experts=2)  # a directory with one GGUF file
    tokenizer, original = transformers.AutoTokenizer.from_pretrained(tmp_path / "moe"), trained_tokenizer()
    for text in (*TEXT, "unseen text: ñ 🙂"):
        ids = tokenizer(text).input_ids
        assert ids == original.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<s>user: hi</s>"
    assert tokenizer(rendered).input_ids[0] == 0, "special tokens in the template are single tokens"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "qwen2"}, "'qwen2' is not Llama-like"),
        ({"scaling": "yarn"}, "scales its rotary embedding .yarn"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(4, np.float32)}}, "rope_freqs"),
        ({"extra_tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, r"attn_q\.bias is not part"),
        ({"experts": 8}, "8 experts"),
    ],
)
def test_what_the_loader_would_drop_is_refused(tmp_path: Path, options: Any, words: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **options)
    with pytest.raises(UnsupportedModelError, match=words):
        upcycle(tmp_path / "tiny.gguf", tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        upcycle(tmp_path / "bad.gguf", tmp_path / "moe")
    write_gguf(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files"):
        upcycle(tmp_path, tmp_path / "moe")
