"""An AsyncLLM on ranks without a model (FakeRank), in this process: fast, and exact about blocks and tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from epruntime.config import EngineConfig
from epruntime.engine.async_llm import AsyncLLM
from epruntime.errors import InvalidRequestError
from epruntime.launchers.base import Seat
from epruntime.launchers.handle import RankHandle
from epruntime.plan import StepPlan
from epruntime.testing.fake_rank import FakeRank

VOCAB, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 50, 4, 64, 128
HOLD_S = 10.0
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
assert len(LETTERS) == VOCAB
#: facts as ModelInfo gives them
INFO: dict[str, Any] = {
    "architecture": "FakeForCausalLM", "model_type": "fake", "dtype": "float32", "vocab_size": VOCAB,
    "hidden_size": 8, "num_layers": 2, "max_position_embeddings": MAX_MODEL_LEN, "num_experts": 4, "top_k": 2,
    "moe_layers": (1,), "eos_token_ids": (), "kv_layers": (), "num_parameters": 10, "checkpoint_bytes": 40,
    "rope": {},
}  # fmt: skip


class LetterTokenizer:
    """One letter is one token. Encoding a text takes `delays[text]` seconds, on whatever thread does it, and waits for
    `holds[text]`.

    Attributes:
        hf: stands in for the transformers tokenizer. encoded: texts, in the order in which they were begun.
        held_too_long: a hold that nobody ended in HOLD_S: who was to end it was held up itself.
    """

    has_chat_template = False
    hf = None

    def __init__(self) -> None:
        self.delays: dict[str, float] = {}
        self.holds: dict[str, threading.Event] = {}
        self.held_too_long = False
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        time.sleep(self.delays.get(text, 0.0))
        if text in self.holds and not self.holds[text].wait(HOLD_S):
            self.held_too_long = True
        if not set(text) <= set(LETTERS):
            raise InvalidRequestError("letters only", field="prompt", value=text)
        return [LETTERS.index(letter) for letter in text]

    def tokens_at_least(self, text: str) -> int:
        return len(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(LETTERS[i] for i in ids)


class FakeHandle(RankHandle):
    """Answers each plan on the next turn of the loop, or when `gate` opens."""

    def __init__(self, slot: int) -> None:
        super().__init__(Seat(slot=slot, host=f"host{slot}", local_rank=0, threads=1), incarnation=0)
        self.rank = FakeRank(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=64, vocab_size=VOCAB
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.tasks: set[asyncio.Task[None]] = set()

    def call(self, type: str, timeout_s: float | None = None, **body: Any) -> asyncio.Future[dict[str, Any]]:
        assert type == "plan"
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.rank.step(StepPlan.from_wire(body["plan"]))

        async def answer() -> None:
            await self.gate.wait()
            if not future.done():
                future.set_result({"result": self.rank.collect().to_wire()})

        task = asyncio.ensure_future(answer())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return future


class FakeGroup:
    """What AsyncLLM needs of a ModelGroup."""

    transport = experts_backend = "fake"
    generation = 0
    max_model_len = MAX_MODEL_LEN

    def __init__(self, num_ranks: int, info: dict[str, Any]) -> None:
        self.ranks = [FakeHandle(slot) for slot in range(num_ranks)]
        self.num_kv_blocks = [NUM_BLOCKS] * num_ranks
        self.info = info

    def on_lost(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: None

    async def stats(self) -> list[dict[str, Any]]:
        return [{} for _ in self.ranks]

    async def unload(self) -> None:
        return None


@asynccontextmanager
async def fake_engine(
    num_ranks: int = 1, info: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[AsyncLLM, list[FakeHandle], LetterTokenizer]]:
    """(engine, its ranks, its tokenizer); shut down at the end."""
    settings = {"model": "none", "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": BLOCK_SIZE}
    config = EngineConfig.from_kwargs(**settings | options)
    group, tokenizer = FakeGroup(num_ranks, INFO | (info or {})), LetterTokenizer()
    engine = AsyncLLM(config, group, None, tokenizer, own_pool=False)  # type: ignore[arg-type]
    try:
        yield engine, group.ranks, tokenizer
    finally:
        for rank in group.ranks:
            rank.gate.set()
        await engine.shutdown()
