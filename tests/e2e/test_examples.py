"""The examples run, and what they print is what transformers computes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_chat_model
import torch
import transformers

from epruntime.testing.server_process import ServerProcess, descendants

ROOT = Path(__file__).parents[2]
PROMPTS = ["The capital of France is", "Two plus two is", "a"]
MAX_TOKENS = 8
DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.save(tmp_path_factory.mktemp("tiny") / "tiny-mixtral")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """Greedy completions, from transformers, one prompt at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = reference.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        texts.append(text.rstrip("\N{REPLACEMENT CHARACTER}"))  # half a character at the end is never given out
    return texts


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments, "--max-tokens", str(MAX_TOKENS), *PROMPTS],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_offline(model: Path, expected: list[str]) -> None:
    before = descendants()
    printed = run_example("offline.py", str(model))
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert f"{prompt!r} -> {text!r} (" in printed
    assert "same seed, same tokens: True" in printed
    assert "chat: " in printed
    assert descendants(before) == []


def test_grpc_client(model: Path, expected: list[str]) -> None:
    async def serve_and_run() -> str:
        server = ServerProcess(
            [str(model), "--expert-parallel-size", "2", "--port", "0", "--grpc-port", "0"], environment=environment()
        )
        async with server:
            address = await server.start(DEADLINE_S)
            printed = await asyncio.to_thread(run_example, "grpc_client.py", "--server", address)
            assert await server.stop() == 0
        return printed

    printed = asyncio.run(serve_and_run())
    assert "tiny-mixtral on 2 ranks, ready" in printed
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert f"{prompt!r} -> {text!r} (" in printed
        assert f"async {prompt!r} -> {text!r}" in printed
    assert "refused: top_p=1.5" in printed
    assert "first piece only: " in printed


def test_grpc_client_without_a_server_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "grpc_client.py"), "--server", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "no epruntime server answers at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
