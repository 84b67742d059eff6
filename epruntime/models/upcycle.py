"""Sparse upcycling: a dense Llama-like checkpoint becomes a Mixtral-architecture mixture of experts.

dense tensors -> copies (attention, norms, embeddings), E noisy copies (MLP), random routers -> shards -> rename

Every expert starts as a copy of the dense MLP (Komatsuzaki et al. 2022, "Sparse Upcycling: Training Mixture-of-Experts
from Dense Checkpoints", arXiv:2212.05055). Mixtral's top-k weights are renormalised to sum to one, so without noise
any choice of experts gives the dense output, up to rounding.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epruntime.errors import CheckpointError, ConfigError, UnsupportedModelError
from epruntime.models import upcycle_gguf
from epruntime.models.upcycle_config import check_tensors, expected_shapes, mixtral_config, read_dense_config
from epruntime.models.upcycle_source import CHUNK_ELEMENTS, DenseSource, SafetensorsSource
from epruntime.models.upcycle_writer import ShardWriter

Progress = Callable[[str, int, int], None]

#: Standard deviation of a fresh router's weights.
ROUTER_STD = 0.02
MAX_SHARD_BYTES = 2 * 2**30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Dense MLP projection -> name of an expert's copy, as Mixtral checkpoints spell it.
EXPERT_NAMES = {"gate_proj.weight": "w1.weight", "up_proj.weight": "w3.weight", "down_proj.weight": "w2.weight"}

#: Files that come along as they are: they say how text becomes tokens, and when an answer ends.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleReport:
    """What `upcycle` made. Tied embeddings count once; active parameters are those that one token uses."""

    out: Path
    source: str
    num_experts: int
    top_k: int
    noise: float
    seed: int
    dtype: str
    dense_parameters: int
    parameters: int
    active_parameters: int
    num_shards: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Output:
    """One tensor to write: a copy of `source`, its noisy copy for `expert`, or (source None) a fresh router."""

    name: str
    shape: tuple[int, ...]
    source: str | None
    expert: int | None = None


def upcycle(
    dense: str | Path,
    out: str | Path,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    noise: float = 0.0,
    seed: int = 0,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> UpcycleReport:
    """Makes a Mixtral-architecture checkpoint, loadable by transformers, from a dense Llama-like one.

    Tokenizer, chat template and generation config come along. Safetensors are streamed in pieces: memory stays at
    some tens of MiB whatever the model's size. GGUF goes through the loader of transformers, which holds the model in
    fp32 and peaks at about twice that size (docs/upcycling.md has the measured numbers). The checkpoint appears under
    `out` complete or not at all.

    Args:
        dense: checkpoint directory (config.json and *.safetensors, or one *.gguf), or a .gguf file.
        out: directory to create; it may exist only if empty.
        num_experts: experts per layer, each a copy of the dense MLP.
        top_k: experts per token, 1..num_experts.
        noise: standard deviation of the Gaussian noise on each expert's copy, relative to that of the tensor. It is
            drawn from (seed, tensor name, expert), so one expert's noise does not depend on how many there are.
        seed: key of router weights and noise, in [0, 2**63).
        dtype: "float32", "bfloat16" or "float16"; None or "auto": the checkpoint's own (for GGUF float32). Noise is
            added in fp32 and rounded once.
        progress: called as progress(what, bytes done, bytes in all).

    Raises:
        ConfigError: a value out of range, `out` in use, or too little disk space.
        UnsupportedModelError: the dense model has what Mixtral has no place for, by name and reason.
        CheckpointError: the dense checkpoint is damaged or incomplete.
    """
    started = time.monotonic()
    _check_arguments(num_experts, top_k, noise, seed, dtype)
    target = _check_target(Path(out))
    directory, gguf_file = _find(Path(dense))
    source: DenseSource
    if gguf_file is not None:
        if progress is not None:
            progress("dequantise", 0, 0)
        config, source, generation = upcycle_gguf.load_gguf(gguf_file)
    else:
        config, source, generation = read_dense_config(directory), SafetensorsSource(directory), None
    try:
        check_tensors(config, source.infos(), str(gguf_file or directory))
        if config.tie_word_embeddings:
            _check_tied(source, str(directory))
        dtype_name = _dtype_name(dtype, config, source)
        outputs = _plan(config, num_experts)
        writer = None
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            partial.chmod(0o755)
            writer = ShardWriter(partial, [(o.name, o.shape) for o in outputs], DTYPES[dtype_name], MAX_SHARD_BYTES)
            _check_space(partial, writer.total_bytes)
            mixtral_config(config, num_experts=num_experts, top_k=top_k, dtype=dtype_name).save_pretrained(partial)
            if gguf_file is not None:
                generation.save_pretrained(partial)
                upcycle_gguf.save_tokenizer(gguf_file, partial)
            else:
                _copy_companions(directory, partial)
            writer.write(_data(outputs, source, DTYPES[dtype_name], noise, seed, writer.total_bytes, progress))
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        source.close()
    parameters = sum(math.prod(o.shape) for o in outputs)
    per_expert = sum(math.prod(o.shape) for o in outputs if o.expert == 0)
    return UpcycleReport(
        out=target,
        source=source.kind,
        num_experts=num_experts,
        top_k=top_k,
        noise=noise,
        seed=seed,
        dtype=dtype_name,
        dense_parameters=sum(math.prod(s) for s in expected_shapes(config).values()),
        parameters=parameters,
        active_parameters=parameters - (num_experts - top_k) * per_expert,
        num_shards=writer.num_shards,
        bytes_written=writer.total_bytes,
        seconds=time.monotonic() - started,
    )


def _plan(config: Any, num_experts: int) -> list[_Output]:
    """Every tensor of the upcycled model, in the order of writing."""
    outputs = []
    for name, shape in expected_shapes(config).items():
        prefix, _, rest = name.partition(".mlp.")
        if not rest:
            outputs.append(_Output(name=name, shape=shape, source=name))
            continue
        block = f"{prefix}.block_sparse_moe"
        if rest == "gate_proj.weight":
            outputs.append(_Output(name=f"{block}.gate.weight", shape=(num_experts, config.hidden_size), source=None))
        copy = EXPERT_NAMES[rest]
        outputs += [
            _Output(name=f"{block}.experts.{expert}.{copy}", shape=shape, source=name, expert=expert)
            for expert in range(num_experts)
        ]
    return outputs


def _data(
    outputs: list[_Output],
    source: DenseSource,
    dtype: torch.dtype,
    noise: float,
    seed: int,
    total_bytes: int,
    progress: Progress | None,
) -> Iterator[Iterator[torch.Tensor]]:
    """Per output tensor, its elements as flat pieces of `dtype`."""
    std_of: tuple[str, float] = ("", 0.0)  # of the dense tensor that is being copied
    done = 0
    for output in outputs:
        if output.source is None:
            router = torch.randn(output.shape, generator=_generator(seed, output.name, 0)) * ROUTER_STD
            pieces = iter([router.reshape(-1).to(dtype)])
        elif output.expert is None or noise == 0.0:
            pieces = (piece.to(dtype) for piece in source.chunks(output.source))
        else:
            if std_of[0] != output.source:
                std_of = (output.source, _standard_deviation(source, output.source))
            pieces = _noisy(source, output, noise * std_of[1], seed, dtype)
        yield pieces
        done += math.prod(output.shape) * dtype.itemsize
        if progress is not None:
            progress("write", done, total_bytes)


def _noisy(source: DenseSource, output: _Output, std: float, seed: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    assert output.source is not None
    assert output.expert is not None
    generator = _generator(seed, output.source, output.expert)
    for piece in source.chunks(output.source):
        drawn = torch.randn(piece.numel(), generator=generator)
        yield drawn.mul_(std).add_(piece.to(torch.float32)).to(dtype)


def _generator(seed: int, name: str, expert: int) -> torch.Generator:
    """A generator keyed by what it is for, so that no draw depends on the order of writing."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{expert}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _standard_deviation(source: DenseSource, name: str) -> float:
    """Population standard deviation in fp64."""
    count, total, squares = 0, 0.0, 0.0
    for piece in source.chunks(name):
        wide = piece.to(torch.float64)
        count += wide.numel()
        total += float(wide.sum())
        squares += float(wide.square_().sum())
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0))


def _check_arguments(num_experts: int, top_k: int, noise: float, seed: int, dtype: str | None) -> None:
    for name, value, low, high in (
        ("num_experts", num_experts, 1, 2**15),
        ("top_k", top_k, 1, num_experts),
        ("seed", seed, 0, 2**63 - 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{name}={value!r}: must be an integer in {low}..{high}")
    if not isinstance(noise, (int, float)) or not 0.0 <= noise < math.inf:
        raise ConfigError(f"noise={noise!r}: must be a finite number, 0 or more (0.02 is small, 1 drowns the model)")
    if dtype not in (None, "auto", *DTYPES):
        raise ConfigError(f"dtype={dtype!r}: must be one of auto, {', '.join(DTYPES)}")


def _check_target(out: Path) -> Path:
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory; name another one, or remove it first")
    return out


def _find(dense: Path) -> tuple[Path, Path | None]:
    """The checkpoint directory, and the GGUF file if it is one."""
    if dense.is_file() and dense.suffix == ".gguf":
        return dense.parent, dense
    if not dense.is_dir():
        raise CheckpointError(
            f"{dense} is neither a directory nor a .gguf file on this machine (models are not "
            "fetched here; download it first)"
        )
    ggufs = sorted(dense.glob("*.gguf"))
    if any(dense.glob("*.safetensors")) or not ggufs:
        return dense, None
    if len(ggufs) > 1:
        raise CheckpointError(f"{dense} holds {len(ggufs)} GGUF files, {ggufs[0].name} among them: name one")
    return dense, ggufs[0]


def _check_tied(source: DenseSource, where: str) -> None:
    """A tied model may carry a copy of the embedding as lm_head; one that differs contradicts its config."""
    infos = source.infos()
    head = infos.get("lm_head.weight")
    if head is None:
        return
    if head != infos["model.embed_tokens.weight"] or not all(
        torch.equal(a, b)
        for a, b in zip(source.chunks("lm_head.weight"), source.chunks("model.embed_tokens.weight"), strict=True)
    ):
        raise CheckpointError(
            f"{where}: tie_word_embeddings is true, but lm_head.weight differs from the embedding; "
            "set it to false in config.json if the two are meant to differ"
        )


def _dtype_name(dtype: str | None, config: Any, source: DenseSource) -> str:
    if dtype not in (None, "auto"):
        return str(dtype)
    # The embedding speaks for a checkpoint whose config names no dtype.
    own = config.dtype if isinstance(config.dtype, torch.dtype) else source.infos()["model.embed_tokens.weight"].dtype
    for name, candidate in DTYPES.items():
        if candidate == own:
            return name
    raise UnsupportedModelError(f"the checkpoint's dtype {own} cannot be kept; choose one of {', '.join(DTYPES)}")


def _check_space(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ConfigError(
            f"{directory.parent}: {num_bytes / 2**30:.2f} GiB to write, {free / 2**30:.2f} GiB free; "
            "choose a larger disk, fewer experts or bfloat16"
        )


def _copy_companions(directory: Path, out: Path) -> None:
    for name in COMPANIONS:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, out / name)
    templates = directory / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name)


__all__ = ["CHUNK_ELEMENTS", "UpcycleReport", "upcycle"]
