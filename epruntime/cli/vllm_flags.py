"""Flags of `vllm serve` and SGLang's server: those that mean the same here under another name, and words for the rest.

Most of vLLM's need neither: --max-model-len, --max-num-seqs, --block-size, --served-model-name, --api-key,
--ssl-certfile and others are our own names, too. Names as in vllm/engine/arg_utils.py,
vllm/entrypoints/openai/cli_args.py and sglang/srt/server_args.py.
"""

from __future__ import annotations

import argparse

_GIB = 2**30


def add_aliases(parser: argparse.ArgumentParser, *, server: bool) -> None:
    """Adds the flags of vLLM that set one of our options; those of a server where the command starts one."""
    group = parser.add_argument_group("names that vLLM has for the same")
    group.add_argument(
        "--num-gpu-blocks-override", dest="num_kv_blocks", type=int, metavar="N", default=argparse.SUPPRESS,
        help="--num-kv-blocks",
    )  # fmt: skip
    group.add_argument(
        "--kv-cache-memory-bytes", dest="kv_cache_memory_gb", type=_gib, metavar="N", default=argparse.SUPPRESS,
        help="--kv-cache-memory-gb, in bytes",
    )  # fmt: skip
    group.add_argument(
        "--expert-placement-strategy", dest="expert_placement", choices=("linear", "round_robin"),
        default=argparse.SUPPRESS, help="--expert-placement",
    )  # fmt: skip
    if server:
        group.add_argument(
            "--disable-log-stats", dest="log_stats_interval_s", action="store_const", const=0.0,
            default=argparse.SUPPRESS, help="--log-stats-interval-s 0",
        )  # fmt: skip


def words(parser: argparse.ArgumentParser, *, server: bool) -> dict[str, str]:
    """Flag that the command has not -> what is said of it. The command's own --model must be there already.

    Args:
        server: the command starts one.
    """
    of_server = SERVER_HINTS if server else dict.fromkeys(SERVER_HINTS, starts_no_server(parser))
    own = "--model" in parser._option_string_actions
    model = "--model DIRECTORY" if own else f"give the model as an argument: {parser.prog} MODEL"
    hints = {**HINTS, **of_server, **dict.fromkeys(("--model", "--model-path"), model)}
    return {flag: f"there is no {flag}: {hint}" for flag, hint in hints.items()}


def starts_no_server(parser: argparse.ArgumentParser) -> str:
    return f"`{parser.prog.rpartition(' ')[2]}` starts no server"


def _gib(text: str) -> float:
    try:
        return int(text) / _GIB
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes") from None


_EXPERTS = (
    "here each rank answers requests of its own and owns a share of every layer's experts: --expert-parallel-size N "
    "is the number of ranks"
)
_LOCAL = "MODEL is a directory on this machine: download the checkpoint first"
_NO_CODE = "code that comes with a checkpoint is never run: architectures are those of transformers"
_NO_QUANTIZATION = "weights and KV cache are float32 or bfloat16: see --dtype"
_NO_LORA = "LoRA adapters are not served: merge them into the checkpoint"
_EAGER = "leave it out: there are no CUDA graphs and no compilation, so every step is eager"
_BALANCE = (
    "experts stay where they are for as long as the ranks run; --num-redundant-experts N makes copies when it starts"
)
_MEMORY = "say how much KV cache each rank gets: --kv-cache-memory-gb X or --num-kv-blocks N"
_MULTI = (
    "several hosts are reached through Ray (--launcher ray --ray-address HOST:PORT) or torchrun "
    "(launch/torchrun_serve.py); docs/launching.md has the commands"
)
_TOOLS = "tool calls are not parsed: the client gets the model's text"
_SPECULATION = "there is no speculative decoding"
_TEXT_ONLY = "only text is taken"
_ONE_SERVER = "one process serves gRPC and HTTP"

#: flag -> what to do instead, in any command that loads a model; never the name of a flag that `serve` has
HINTS: dict[str, str] = {
    **dict.fromkeys(
        ("--tensor-parallel-size", "--tp-size", "--tp", "-tp", "--data-parallel-size", "--dp-size", "--dp", "-dp",
         "--ep-size", "--ep", "--all2all-backend", "--moe-a2a-backend"), _EXPERTS,
    ),
    **dict.fromkeys(
        ("--enable-expert-parallel", "-ep", "--enable-ep-moe", "--enable-dp-attention"), f"leave it out: {_EXPERTS}",
    ),
    **dict.fromkeys(
        ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"), f"layers are not spread over ranks; {_EXPERTS}",
    ),
    "--distributed-executor-backend": "--launcher ray for ray, --launcher local for mp",
    **dict.fromkeys(
        ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless", "--data-parallel-address",
         "--data-parallel-size-local", "--data-parallel-start-rank", "--data-parallel-backend", "--dist-init-addr"),
        _MULTI,
    ),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static", "--swap-space", "--cpu-offload-gb"), _MEMORY),
    **dict.fromkeys(("--enable-eplb", "--eplb-config"), _BALANCE),
    **dict.fromkeys(("--download-dir", "--revision", "--hf-token", "--load-format", "--tokenizer-revision"), _LOCAL),
    "--trust-remote-code": _NO_CODE,
    **dict.fromkeys(("--quantization", "-q", "--kv-cache-dtype"), _NO_QUANTIZATION),
    **dict.fromkeys(("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank"), _NO_LORA),
    **dict.fromkeys(
        ("--enforce-eager", "--compilation-config", "-O", "--cudagraph-capture-sizes", "--disable-cuda-graph"), _EAGER,
    ),
    "--seed": "each request has its own seed; one without is given one, and told it",
    "--enable-chunked-prefill": "leave it out: prefill is always chunked, to --max-num-batched-tokens",
    "--async-scheduling": "--pipeline-depth 2, which is the default, plans a step ahead",
    **dict.fromkeys(("--speculative-config", "--speculative-model"), _SPECULATION),
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs"), _TEXT_ONLY),
    "--scheduling-policy": "requests are scheduled in the order in which they come",
    "--device": "leave it out: only the CPU is used, also where there are GPUs",
    "--skip-tokenizer-init": "leave it out: a model without tokenizer files is served for token ids",
    "--config": "give the options as flags",
    "--log-level": "EPRUNTIME_LOG_LEVEL sets the level of all logs",
    "--tokenizer-path": "--tokenizer DIRECTORY",
    "--context-length": "--max-model-len N",
    "--max-running-requests": "--max-num-seqs N, for each rank",
    "--chunked-prefill-size": "--max-num-batched-tokens N",
    "--page-size": "--block-size N",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--ep-num-redundant-experts": "--num-redundant-experts N",
}  # fmt: skip

#: the same, of flags that only a server has a use for
SERVER_HINTS: dict[str, str] = {
    "--max-logprobs": "every request may ask for up to 20",
    "--override-generation-config": "send the parameters with the request, or --generation-config none",
    "--disable-log-requests": "leave it out: requests are not logged",
    "--enable-log-requests": "requests are not logged: EPRUNTIME_LOG_LEVEL=DEBUG shows what the engine does",
    "--uvicorn-log-level": "EPRUNTIME_LOG_LEVEL sets the level of all logs",
    "--disable-uvicorn-access-log": "leave it out: there is no access log",
    **dict.fromkeys(("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"), _TOOLS),
    **dict.fromkeys(("--api-server-count", "--disable-frontend-multiprocessing"), _ONE_SERVER),
    "--ssl-cert-reqs": "--ssl-ca-certs FILE makes clients bring a certificate of those authorities",
}
