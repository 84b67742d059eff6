"""The command line: flags from dataclasses, usage errors, missing extras."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

import pytest

from epruntime.cli import flags
from epruntime.cli.main import main, make_parser
from epruntime.config import EngineConfig, ServeConfig
from epruntime.errors import CheckpointError
from epruntime.sampling_params import SamplingParams
from epruntime.version import __version__

COMMANDS = (
    "serve", "generate", "chat", "info", "health", "tokenize", "detokenize", "upcycle", "collect-env", "completion",
    "models", "preflight",
)  # fmt: skip
#: fields that a chat has no use for: it shows one answer, as text
NOT_IN_CHAT = {"n", "logprobs", "prompt_logprobs"}


def _help(capsys, *command: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def _dense(text: str) -> str:
    return "".join(text.split())


def test_every_config_field_has_a_flag_with_its_help_and_default(capsys):
    text = _help(capsys, "serve")
    for kind in (*EngineConfig.SECTIONS.values(), ServeConfig):
        for f in fields(kind):
            if not f.metadata.get("cli", True):
                assert f"{flags.flag_of(f.name)} " not in text
                continue
            if not f.metadata.get("positional"):
                assert flags.flag_of(f.name) in text
            assert _dense(f.metadata["help"]) in _dense(text)
    assert "--max-num-seqs N most sequences running at once on one rank (default: 64)" in text
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in text


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_field_has_a_flag_with_help(capsys, command):
    text = _help(capsys, command)
    docs = flags.attribute_docs(SamplingParams)
    assert set(docs) == {f.name for f in fields(SamplingParams)}
    for f in fields(SamplingParams):
        if command == "chat" and f.name in NOT_IN_CHAT:
            assert f"{flags.flag_of(f.name)} " not in text
            continue
        assert flags.flag_of(f.name) in text
        assert _dense(docs[f.name]) in _dense(text)  # help breaks lines at hyphens, too


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_works(capsys, command):
    assert "usage: epruntime" in _help(capsys, *command)


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"epruntime {__version__}\n"


def test_flags_become_config():
    args = make_parser().parse_args([
        "serve", "M", "--expert-parallel-size", "2", "--dtype", "float32", "--no-enable-prefix-caching",
        "--kv-cache-memory-gb", "0.5", "--port", "0", "--drain-timeout-s", "1.5", "--launcher", "ray",
    ])  # fmt: skip
    assert flags.engine_config(args) == EngineConfig.from_kwargs(
        model="M", expert_parallel_size=2, dtype="float32", enable_prefix_caching=False, kv_cache_memory_gb=0.5,
        launcher="ray",
    )  # fmt: skip
    assert flags.serve_config(args) == ServeConfig(port=0, drain_timeout_s=1.5)
    assert flags.engine_config(make_parser().parse_args(["serve", "M"])) == EngineConfig.from_kwargs(model="M")


def test_tuple_flags_repeat_and_leave_prompts_alone():
    args = make_parser().parse_args(["generate", "--stop", "a", "--stop-token-ids", "1", "--stop", "b", "prompt"])
    assert args.prompts == ["prompt"]
    assert flags.sampling_fields(args)["stop"] == ("a", "b")
    assert flags.sampling_fields(args)["stop_token_ids"] == (1,)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nonsense"], "nonsense"),
        (["serve"], "MODEL"),
        (["serve", "M", "--port", "x"], "--port"),
        (["serve", "M", "--port", "70000"], "port=70000"),
        (["serve", "M", "--dtype", "int3"], "int3"),
        (["serve", "M", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["serve", "M", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "max_num_batched_tokens=8"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--top-p", "nan"], "top_p"),
        (["generate", "x", "--model", "M", "--server", "a:1"], "--server"),
        (["generate", "x", "--expert-parallel-size", "2"], "--model"),
        (["generate", "x", "--server", "nonsense"], "HOST:PORT"),
        (["chat", "--server", "nonsense"], "HOST:PORT"),
        (["upcycle", "only-one"], "OUT"),
    ],
)
def test_wrong_usage_is_2(capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("module", "extra"), [("torch", "serve"), ("grpc_health", "serve"), ("ray", "ray")])
def test_a_missing_extra_says_what_to_install(capsys, monkeypatch, module, extra):
    def run(args: argparse.Namespace) -> int:
        raise ModuleNotFoundError(f"No module named '{module}.sub'", name=f"{module}.sub")

    monkeypatch.setattr("epruntime.cli.serve.run", run)
    assert main(["serve", "M"]) == 1
    err = capsys.readouterr().err
    assert f"{module} is not installed" in err
    assert f"pip install 'epruntime[{extra}]'" in err


def test_another_missing_module_is_a_fault(monkeypatch):
    def run(args: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'epruntime.nope'", name="epruntime.nope")

    monkeypatch.setattr("epruntime.cli.serve.run", run)
    with pytest.raises(ModuleNotFoundError):
        main(["serve", "M"])


def test_errors_and_interrupts_become_exit_codes(capsys, monkeypatch):
    def fails(args: argparse.Namespace) -> int:
        raise CheckpointError("model.safetensors is cut off")

    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("epruntime.cli.upcycle.run", fails)
    assert main(["upcycle", "a", "b"]) == 1
    assert capsys.readouterr().err == "epruntime upcycle: model.safetensors is cut off\n"
    monkeypatch.setattr("epruntime.cli.upcycle.run", interrupted)
    assert main(["upcycle", "a", "b"]) == 130


def test_upcycle_passes_its_flags_on(capsys, monkeypatch):
    pytest.importorskip("torch")
    from epruntime.models import upcycle as made

    seen = {}

    def upcycle(dense, out, **options):
        seen.update(options, dense=dense, out=out)
        options["progress"]("copy", 1, 2)
        return made.UpcycleReport(
            out=out, source=dense, num_experts=4, top_k=1, noise=0.5, seed=9, dtype="bfloat16", dense_parameters=10**6,
            parameters=3 * 10**6, active_parameters=2 * 10**6, num_shards=1, bytes_written=2**20, seconds=1.0,
        )  # fmt: skip

    monkeypatch.setattr(made, "upcycle", upcycle)
    argv = ["upcycle", "D", "O", "--num-experts", "4", "--top-k", "1", "--noise", "0.5", "--seed", "9"]
    assert main([*argv, "--dtype", "bfloat16"]) == 0
    del seen["progress"]
    assert seen == {
        "dense": "D", "out": "O", "num_experts": 4, "top_k": 1, "noise": 0.5, "seed": 9, "dtype": "bfloat16"
    }  # fmt: skip
    assert "O: 4 experts, top-1, bfloat16" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["epruntime", *argv])
    assert main() == 0
    assert seen["dtype"] is None
