"""One frozen dataclass per concern. CLI flags, their help and defaults, and LLM's keywords come from these fields."""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar

from epruntime.errors import ConfigError

_ORIGIN = re.compile(r"""\*|[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#,\s"']+""")


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), cli: bool = True, secret: bool = False) -> Any:
    """A documented config field. `choices`: allowed values; `cli=False`: no flag; `secret`: left out of repr."""
    return field(default=default, repr=not secret, metadata={"help": help, "choices": choices, "cli": cli})


def _check_fields(config: Any) -> None:
    """Every value is of its field's declared type, and one of its choices."""
    hints = typing.get_type_hints(type(config))
    for f in fields(config):
        value, hint = getattr(config, f.name), hints[f.name]
        if typing.get_origin(hint) is tuple:
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                shown = f"{f.name}={value!r}" if f.repr else f.name  # a secret is not repeated
                raise ConfigError(f"{shown}: must be a tuple of texts")
            continue
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not any(_is_a(value, kind) for kind in allowed):
            names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in allowed)
            raise ConfigError(f"{f.name}={value!r}: must be {names}")
        choices = f.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise ConfigError(f"{f.name}={value!r}: must be one of {', '.join(choices)}")


def _is_a(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _at_least(config: Any, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= minimum:  # written so that NaN is refused
            raise ConfigError(f"{name}={value!r}: must be at least {minimum}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is served."""

    model: str = field(
        metadata={"help": "directory of a transformers MoE checkpoint (config.json, *.safetensors)", "positional": True}
    )
    tokenizer: str | None = option(None, "directory of the tokenizer; default: the model's own")
    served_model_name: str | None = option(None, "name shown to clients; default: the model directory's name")
    dtype: str = option(
        "auto", "dtype of weights and activations; auto: the checkpoint's own", choices=("auto", "float32", "bfloat16")
    )
    max_model_len: int | None = option(None, "longest prompt plus output in tokens; default: the model's own limit")
    generation_config: str = option(
        "auto",
        "sampling defaults for requests that leave a parameter out; auto: from the checkpoint's "
        "generation_config.json; none: those of SamplingParams",
        choices=("auto", "none"),
    )
    chat_template: str | None = option(None, "file with a Jinja chat template; default: the tokenizer's own")

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        _check_fields(self)
        _at_least(self, 1, "max_model_len")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How ranks are laid out, started and connected."""

    expert_parallel_size: int = option(1, "number of ranks; each owns a shard of every layer's experts")
    expert_placement: str = option(
        "linear",
        "which rank owns which experts of a layer; linear: contiguous blocks; round_robin: expert e on rank e mod "
        "ranks",
        choices=("linear", "round_robin"),
    )
    num_redundant_experts: int = option(
        0,
        "physical experts per layer beyond one per logical expert: further copies on other ranks, to which tokens are "
        "dealt in turn; each takes the memory of an expert",
    )
    launcher: str = option(
        "local",
        "what starts the ranks; torchrun: only in a program that torchrun starts, as launch/torchrun_serve.py is",
        choices=("local", "ray", "torchrun"),
    )
    ray_address: str | None = option(
        None,
        "address of the Ray cluster, or auto; default: the one that this process is connected to, else one is started "
        "on this machine",
    )
    placement_group: object | None = option(
        None,
        "Ray placement group of the caller in which the ranks are started; it is not removed. Default: that of the "
        "task or actor that makes the engine, if it captures child tasks; else one is made",
        cli=False,
    )
    transport: str = option("auto", "all-to-all transport; auto: the best supported", choices=("auto", "local", "gloo"))
    experts_backend: str = option(
        "auto", "expert MLP; auto: the best supported", choices=("auto", "native", "grouped_mm", "reference")
    )
    invariance: str = option(
        "strict",
        "strict: a token's bits depend on its own request alone, by kernels made for it; fast: torch's own kernels",
        choices=("strict", "fast"),
    )
    exchange_budget_tokens: int = option(
        8192, "most rows a rank receives in one exchange round; larger steps run in several rounds"
    )
    threads_per_rank: int | None = option(None, "compute threads per rank; default: this host's cores / its ranks")
    start_timeout_s: float = option(120.0, "seconds within which all ranks must have started")
    load_timeout_s: float = option(1800.0, "seconds within which all ranks must have loaded the model")
    step_timeout_s: float = option(120.0, "seconds within which a step must end on every rank")
    heartbeat_timeout_s: float = option(
        10.0,
        "seconds of silence of a rank's progress thread after which the rank counts as lost; at most 0.8 of "
        "step_timeout_s",
    )
    preflight: bool = option(
        True, "before the model is loaded, check versions, memory, limits, addresses and the network of all ranks"
    )
    restart: bool = option(False, "replace lost ranks and load the model again, instead of ending the engine")
    max_restarts: int = option(3, "restarts within an hour, after which a lost rank ends the engine")

    def __post_init__(self) -> None:
        _check_fields(self)
        _at_least(self, 1, "expert_parallel_size", "exchange_budget_tokens", "threads_per_rank", "max_restarts")
        _at_least(self, 0, "num_redundant_experts")
        _at_least(self, 0, "start_timeout_s", "load_timeout_s", "step_timeout_s", "heartbeat_timeout_s")
        if self.placement_group is not None and self.launcher != "ray":
            raise ConfigError(f"placement_group is of Ray, and launcher={self.launcher!r}: set launcher='ray'")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of each rank."""

    block_size: int = option(16, "tokens per KV block")
    kv_cache_memory_gb: float | None = option(
        None,
        "KV budget per rank in GiB; default: what max_num_seqs sequences of max_model_len need, at most a quarter of "
        "the free memory per rank",
    )
    num_kv_blocks: int | None = option(None, "KV blocks per rank; overrides kv_cache_memory_gb")
    enable_prefix_caching: bool = option(True, "reuse KV blocks of equal prompt prefixes on the same rank")

    def __post_init__(self) -> None:
        _check_fields(self)
        _at_least(self, 1, "block_size", "num_kv_blocks")
        if self.kv_cache_memory_gb is not None and not self.kv_cache_memory_gb > 0:
            raise ConfigError(f"kv_cache_memory_gb={self.kv_cache_memory_gb!r}: must be positive")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Continuous batching, per rank."""

    max_num_seqs: int = option(64, "most sequences running at once on one rank")
    max_num_batched_tokens: int = option(512, "most tokens that one rank computes in one step")
    pipeline_depth: int = option(2, "plans in flight: 2 sends the next plan before the last result is back")
    max_queued_requests: int = option(
        4096, "sequences (n per request) accepted and not yet finished, beyond which new requests are refused"
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        _at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "pipeline_depth", "max_queued_requests")
        if self.pipeline_depth > 2:
            raise ConfigError(f"pipeline_depth={self.pipeline_depth}: must be 1 or 2")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} is above max_num_batched_tokens={self.max_num_batched_tokens}: "
                "every running sequence needs one token per step; lower the first or raise the second"
            )


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The front ends: gRPC and OpenAI-compatible HTTP."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "HTTP port; 0 picks a free one and prints it")
    grpc_port: int = option(50051, "gRPC port; 0 picks a free one and prints it")
    http: bool = option(True, "serve the OpenAI-compatible HTTP API, /health and /metrics")
    api_key: tuple[str, ...] = option(
        (),
        "bearer token that gRPC and HTTP calls must bring; better set EPRUNTIME_API_KEY, which `ps` does not show",
        secret=True,
    )
    ssl_certfile: str | None = option(None, "PEM certificate chain: serve TLS on both ports")
    ssl_keyfile: str | None = option(None, "PEM private key of --ssl-certfile")
    ssl_ca_certs: str | None = option(None, "PEM authorities: clients must bring a certificate of theirs (mTLS)")
    allowed_origins: tuple[str, ...] = option((), "origin of web pages that may call the HTTP API (CORS); *: any")
    drain_timeout_s: float = option(30.0, "seconds that running requests get to end after SIGTERM")
    max_message_mb: int = option(16, "largest gRPC message or HTTP body accepted, MiB")
    log_stats_interval_s: float = option(10.0, "seconds between log lines about load and speed; 0: none")
    expert_metrics: str = option(
        "rank",
        "detail of the expert load in /metrics; rank: tokens by layer and rank; expert: also by layer and expert, "
        "which is layers x experts time series",
        choices=("rank", "expert"),
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("port", "grpc_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name}={getattr(self, name)}: must be in 0..65535")
        if self.http and self.port == self.grpc_port != 0:
            raise ConfigError(f"port={self.port} and grpc_port={self.grpc_port}: HTTP and gRPC need a port each")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile go together: give both, or neither")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs needs ssl_certfile and ssl_keyfile, too")
        if not all(self.api_key):
            raise ConfigError("api_key: an empty token would let everyone in; leave it out to need none")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin!r} is no origin that a browser sends: give SCHEME://HOST or "
                    "SCHEME://HOST:PORT without a path, each by itself, or * for all"
                )
        _at_least(self, 0, "drain_timeout_s", "log_stats_interval_s")
        _at_least(self, 1, "max_message_mb")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All that an engine needs: the concerns above, composed."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    SECTIONS: ClassVar[dict[str, type]] = {
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
    }

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Builds the config from flat keywords (`EngineConfig.from_kwargs(model=..., expert_parallel_size=2)`).

        Raises:
            TypeError: an unknown keyword, with the nearest known one.
            ConfigError: a value out of range.
        """
        owner = {f.name: section for section, kind in cls.SECTIONS.items() for f in fields(kind)}
        parts: dict[str, dict[str, Any]] = {section: {} for section in cls.SECTIONS}
        for name, value in kwargs.items():
            if name not in owner:
                near = difflib.get_close_matches(name, owner, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"unknown engine option {name!r}{hint}")
            parts[owner[name]][name] = value
        return cls(**{section: kind(**parts[section]) for section, kind in cls.SECTIONS.items()})


def has_default(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING
