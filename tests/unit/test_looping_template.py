"""A chat template that loops ends its own request, soon, with words; the text thread goes on with the others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import tiny_tokenizers

from epruntime.engine import chat_template
from epruntime.engine.text_thread import TextThread
from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import ConfigError, InvalidRequestError

#: loops when a message says so; the sandbox bounds one range, and not loops in loops
LOOPS = (
    "{% for m in messages %}{% if m.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture
def looping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(chat_template, "TEMPLATE_S", 0.3)
    return Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=LOOPS))


def _chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_only_the_request_that_loops_ends(looping: Tokenizer) -> None:
    async def body() -> None:
        thread = TextThread()
        began = time.monotonic()
        jobs = [thread.submit(lambda text=text: looping.encode_chat(_chat(text))) for text in ("a", "loop", "b")]
        done = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
        assert time.monotonic() - began < 60
        assert [done[0][0], done[2][0]] == ["a", "b"]
        assert isinstance(done[1], InvalidRequestError)
        assert done[1].field == "messages"
        assert "did not end with these messages within 0.3 s" in str(done[1])
        thread.close()

    asyncio.run(body())


def test_a_template_that_always_loops_is_refused_at_the_start(looping: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template: it does not end"):
        Tokenizer(tmp_path, template=LOOPS.replace("m.content == 'loop'", "true"))
