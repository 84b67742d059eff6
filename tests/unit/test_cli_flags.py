"""Flags: written out, never abbreviated; hints for vLLM's; biases; secrets that no message repeats."""

from __future__ import annotations

import re

import pytest

from epruntime.cli import flags
from epruntime.cli.main import main, make_parser
from epruntime.cli.vllm_flags import HINTS
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


def test_hints_name_only_flags_that_are_there_and_stand_for_none_that_is():
    commands = next(action for action in make_parser()._actions if action.dest == "command")
    own = set(commands.choices["serve"]._option_string_actions)
    assert not own & set(HINTS)
    for hint in HINTS.values():
        assert set(re.findall(r"--[\w-]+", hint)) <= own, hint


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
