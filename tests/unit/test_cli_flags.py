"""Flags: written out, never abbreviated; hints for vLLM's; biases; secrets that no message repeats."""

from __future__ import annotations

import re

import pytest

from epruntime.cli import flags
from epruntime.cli.main import main, make_parser
from epruntime.cli.vllm_flags import HINTS, SERVER_HINTS
from epruntime.config import ServeConfig
from epruntime.errors import ConfigError


def _refused(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--tensor-parallel-size", "2", "M"], "there is no --tensor-parallel-size: .*--expert-parallel-size"),
        (["serve", "-tp=2", "M"], "there is no -tp: .*--expert-parallel-size N is the number of ranks"),
        (["serve", "--model", "M"], "epruntime serve MODEL"),
        (["serve", "M", "--enable-expert-parallel"], "leave it out"),
        (["serve", "M", "--gpu-memory-utilization", "0.9"], "--kv-cache-memory-gb"),
        (["serve", "M", "--max-model", "9"], "there is no --max-model; did you mean --max-model-len?"),
        (["serve", "M", "--max_num_seqs=9"], "did you mean --max-num-seqs?"),
        (["generate", "x", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "x", "--temp", "1"], "there is no --temp"),
        (["serve", "M", "--zzz"], "there is no --zzz$"),
        (["serve", "M", "--tp", "2"], "there is no --tp: .*--expert-parallel-size N"),
        (["serve", "--model-path", "M"], "there is no --model-path: .*epruntime serve MODEL"),
        (["serve", "M", "--ep-size", "2"], "there is no --ep-size: .*--expert-parallel-size N"),
        (["serve", "M", "--ep", "2"], "there is no --ep: .*--expert-parallel-size N"),
        (["serve", "M", "--mem-fraction-static", "0.8"], "--kv-cache-memory-gb"),
        (["serve", "M", "--device", "cuda"], "only the CPU is used"),
        (["preflight", "M", "--device", "cuda"], "only the CPU is used"),
        (["verify", "M", "-tp", "2"], "there is no -tp: .*--expert-parallel-size N"),
        (["verify", "--model", "M"], "epruntime verify MODEL"),
        (["generate", "x", "--model-path", "M"], "there is no --model-path: --model DIRECTORY"),
        (["generate", "x", "--model", "M", "--enable-expert-parallel"], "leave it out"),
        (["verify", "M", "--ssl-cert-reqs", "2"], "there is no --ssl-cert-reqs: `verify` starts no server$"),
        (["serve", "M", "extra"], "unrecognized arguments: extra"),
        (["serve", "M", "--dtype", "half"], "invalid choice: 'half'"),
        (["serve", "M", "--kv-cache-memory-bytes", "1G"], "'1G' is not a number of bytes"),
    ],
)
def test_a_flag_that_is_not_there(capsys, argv, said):
    assert re.search(said.replace("?", r"\?"), _refused(capsys, *argv).strip(), re.MULTILINE)


def test_flags_that_vllm_has_for_the_same():
    args = make_parser().parse_args([
        "serve", "M", "--kv-cache-memory-bytes", str(3 * 2**29), "--num-gpu-blocks-override", "7", "--dtype", "float",
        "--disable-log-stats", "--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "32",
        "--block-size", "8", "--served-model-name", "m", "--api-key", "k1", "--api-key", "k2", "--ssl-certfile", "c",
        "--ssl-keyfile", "k", "--ssl-ca-certs", "a", "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", "1",
        "--generation-config", "auto", "--chat-template", "t", "--tokenizer", "x", "--allowed-origins", "http://a",
        "--expert-placement-strategy", "round_robin", "--num-redundant-experts", "3",
    ])  # fmt: skip
    engine, serve = flags.engine_config(args), flags.serve_config(args)
    assert (engine.cache.kv_cache_memory_gb, engine.cache.num_kv_blocks, engine.model.dtype) == (1.5, 7, "float32")
    assert (engine.parallel.expert_placement, engine.parallel.num_redundant_experts) == ("round_robin", 3)
    assert (serve.log_stats_interval_s, serve.api_key, serve.allowed_origins) == (0.0, ("k1", "k2"), ("http://a",))


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["preflight", "M", "--host", "0.0.0.0"], "--host"),
        (["verify", "M", "--restart"], "--restart"),
        (["verify", "M", "--no-http"], "--no-http"),
        (["preflight", "M", "--disable-log-stats"], "--disable-log-stats"),
        (["generate", "x", "--model", "M", "--port=1"], "--port"),
    ],
)
def test_a_flag_that_only_a_server_has(capsys, argv, flag):
    said = _refused(capsys, *argv).splitlines()[-1]
    command = argv[0]
    assert said == f"epruntime {command}: error: {flag} is a flag of `serve`: `{command}` starts no server"


@pytest.mark.parametrize("argv", [["preflight", "M"], ["verify", "M"], ["generate", "x", "--model", "M"]])
def test_commands_that_start_ranks_know_vllms_names_too(argv):
    args = make_parser().parse_args([
        *argv, "--num-gpu-blocks-override", "10", "--kv-cache-memory-bytes", str(2**29), "--expert-placement-strategy",
        "round_robin",
    ])  # fmt: skip
    engine = flags.engine_config(args)
    assert (engine.cache.num_kv_blocks, engine.cache.kv_cache_memory_gb) == (10, 0.5)
    assert engine.parallel.expert_placement == "round_robin"


@pytest.mark.parametrize("command", ["serve", "preflight", "verify", "generate"])
def test_hints_name_only_flags_that_are_there(command):
    parser = next(action for action in make_parser()._actions if action.dest == "command").choices[command]
    own = set(parser._option_string_actions)
    for flag, said in parser.hints.items():
        if flag not in own:
            assert set(re.findall(r"--[\w-]+", said)) - {flag} <= own, said


def test_hints_stand_for_no_flag_that_serve_has():
    own = next(action for action in make_parser()._actions if action.dest == "command").choices["serve"]
    assert not set(own._option_string_actions) & {*HINTS, *SERVER_HINTS}


def test_biases_add_up_and_are_refused_with_words(capsys):
    args = make_parser().parse_args(["generate", "x", "--logit-bias", "17=-5", "--logit-bias", "9=1.5"])
    assert flags.sampling_fields(args) == {"logit_bias": {17: -5.0, 9: 1.5}, "max_tokens": 128}
    assert "'17' is not ID=VALUE" in _refused(capsys, "generate", "x", "--logit-bias", "17")
    assert "token 3 has a bias already" in _refused(capsys, "generate", "--logit-bias", "3=1", "--logit-bias", "3=2")
    assert "[-100, 100]" in _refused(capsys, "generate", "x", "--logit-bias", "3=101")


def test_no_message_repeats_a_token(capsys):
    said = _refused(capsys, "serve", "M", "--api-key", "s3cret", "--port", "-1")
    assert "port=-1" in said
    assert "s3cret" not in said
    with pytest.raises(ConfigError, match=r"^api_key: must be a tuple of texts$"):
        ServeConfig(api_key=["s3cret"])
    assert "s3cret" not in repr(ServeConfig(api_key=("s3cret",)))
