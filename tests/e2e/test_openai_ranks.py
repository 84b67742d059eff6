"""The official client against `epruntime serve` with two ranks: texts and scores as from transformers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
import tiny_chat_model
import torch
import transformers

from epruntime.testing.patience import PATIENCE_S
from epruntime.testing.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PROMPTS = ["The capital of France is", "Two plus two is", "a"]
MAX_TOKENS = 8
DEADLINE_S = 120
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.save(tmp_path_factory.mktemp("tiny") / "tiny-mixtral")


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[transformers.PreTrainedTokenizerFast, transformers.PreTrainedModel]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(model).eval()


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    arguments = ["--expert-parallel-size", "2", "--port", "0", "--grpc-port", "0", "--threads-per-rank", "1"]
    server = ServerProcess([str(model), *arguments], environment=ENVIRONMENT)
    with asyncio.Runner() as runner:
        try:
            runner.run(server.start(DEADLINE_S))
            yield server.http_url
        finally:
            status = runner.run(server.stop())
    assert status == 0


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="x", timeout=DEADLINE_S) as made:
        yield made


def greedy(reference, ids: list[int]) -> str:
    tokenizer, model = reference
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False)
    text = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character at the end is never given out


def test_completions(client, reference):
    tokenizer, _ = reference
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    expected = [greedy(reference, one) for one in ids]
    for prompt in (PROMPTS, ids):
        answer = client.completions.create(model="tiny-mixtral", prompt=prompt, temperature=0, max_tokens=MAX_TOKENS)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_chat_stream(client, reference):
    tokenizer, _ = reference
    messages = [{"role": "user", "content": "Two plus two is"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    stream = client.chat.completions.create(
        model="tiny-mixtral", messages=messages, temperature=0, max_tokens=MAX_TOKENS, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy(reference, ids)
    assert last.usage.prompt_tokens == len(ids)


def test_keywords_for_the_chat_template(client, reference):
    tokenizer, _ = reference
    messages = [{"role": "user", "content": "Two plus two is"}]
    options = {"model": "tiny-mixtral", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    lengths = set()
    for keywords in ({}, {"tone": "Once upon a time"}):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **keywords)
        answer = client.chat.completions.create(**options, extra_body={"chat_template_kwargs": keywords})
        assert answer.choices[0].message.content == greedy(reference, ids)
        assert answer.usage.prompt_tokens == len(ids)
        lengths.add(len(ids))
    assert len(lengths) == 2
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="set by this server") as caught:
            client.chat.completions.create(
                **options, stream=stream, extra_body={"chat_template_kwargs": {"tone": "calm", "tokenize": True}}
            )
        assert caught.value.param == "chat_template_kwargs.tokenize"


def test_scores_of_a_text(client, reference):
    """What evaluation harnesses ask for: log-probabilities of the prompt's own tokens."""
    tokenizer, model = reference
    ids = tokenizer(PROMPTS[0]).input_ids
    with torch.inference_mode():
        table = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    answer = client.completions.create(model="tiny-mixtral", prompt=ids, echo=True, max_tokens=0, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.tokens == [tokenizer.decode([token]) for token in ids]
    for position, token in enumerate(ids[1:]):
        assert logprobs.token_logprobs[position + 1] == pytest.approx(table[position, token].item(), abs=1e-4)
        best = max(logprobs.top_logprobs[position + 1].values())
        assert best == pytest.approx(table[position].max().item(), abs=1e-4)
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_n_choices_are_those_of_their_seeds(client):
    options = {"model": "tiny-mixtral", "prompt": PROMPTS[0], "temperature": 1.0, "max_tokens": MAX_TOKENS}
    together = client.completions.create(**options, n=3, seed=5)
    alone = [client.completions.create(**options, seed=choice.seed) for choice in together.choices]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert len({choice.seed for choice in together.choices}) == 3


def test_a_client_that_leaves_frees_the_cache(client, url):
    def gauge(name: str) -> float:
        lines = httpx2.get(url + "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and line[len(name)] in "{ ")

    stream = client.completions.create(
        model="tiny-mixtral", prompt=PROMPTS[0], stream=True, extra_body={"ignore_eos": True}, max_tokens=100_000
    )
    next(stream)
    assert gauge("epruntime_num_requests_running") == 1
    stream.close()
    left = time.monotonic()
    # Blocks that a step in flight may still write are free one step after the request has gone.
    while gauge("epruntime_num_requests_running") or gauge("epruntime_kv_cache_usage_perc"):
        assert time.monotonic() - left < PATIENCE_S
        time.sleep(0.05)


def test_example(url):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "openai_client.py"), "--server", url, "--max-tokens", "8", *PROMPTS],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model: tiny-mixtral" in done.stdout
    assert all(f"{prompt!r} -> " in done.stdout and f"chat {prompt!r} -> " in done.stdout for prompt in PROMPTS)
    assert "refused: top_p=1.5" in done.stdout


def test_example_without_a_server_says_so():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "openai_client.py"), "--server", "http://127.0.0.1:1"],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
