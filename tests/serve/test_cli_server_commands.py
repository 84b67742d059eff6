"""The commands that ask a server: n sequences, log-probabilities, info, tokens; TLS, access tokens, errors in words."""

from __future__ import annotations

import json

import pytest
from certificates import Authority
from fake_llm import FakeLLM
from serving import Serving

from epruntime.cli.main import main
from epruntime.engine.status import EngineState


@pytest.fixture(scope="module")
def server():
    with Serving() as running:
        yield running


def _run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_n_sequences_as_text(capsys, server):
    argv = ["generate", "--server", server.address, "abc", "--n", "3", "--max-tokens", "4"]
    assert _run(capsys, *argv) == (0, "--- 1/3\nabca\n--- 2/3\nbcab\n--- 3/3\ncabc\n", "")


def test_n_sequences_of_many_prompts_as_json(capsys, server):
    argv = ["generate", "--server", server.address, "abc", "xy", "--n", "2", "--max-tokens", "3", "--json"]
    code, out, _ = _run(capsys, *argv)
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert [(o["index"], o["text"], o["finish_reason"]) for o in first["outputs"]] == [
        (0, "abc", "length"),
        (1, "bca", "length"),
    ]
    assert [o["text"] for o in second["outputs"]] == ["xyx", "yxy"]
    assert (second["prompt_tokens"], second["output_tokens"], second["cached_tokens"]) == (2, 6, 2)


def test_prompt_logprobs(capsys, server):
    argv = [
        "generate",
        "--server",
        server.address,
        "ab",
        "--max-tokens",
        "1",
        "--prompt-logprobs",
        "1",
        "--logprobs",
        "0",
    ]
    code, out, _ = _run(capsys, *argv, "--json")
    facts = json.loads(out)
    assert code == 0
    own, other = {"token_id": 98, "token": "b", "logprob": -0.5}, {"token_id": 0, "token": "0", "logprob": -1.0}
    assert facts["prompt_logprobs"] == [None, [own, other]]
    assert facts["outputs"][0]["logprobs"] == [[{"token_id": 97, "token": "a", "logprob": -0.5}]]
    code, out, _ = _run(capsys, *argv)
    assert out.splitlines() == [
        "a",
        "--- log-probabilities of the prompt",
        "           (nothing predicts the first token)",
        "  -0.5000  'b' (98), '0' (0) -1.0000",
        "--- log-probabilities",
        "  -0.5000  'a' (97)",
    ]


def test_sampling_flags_reach_the_engine(capsys, server):
    flags = {"--min-p": 0.25, "--repetition-penalty": 1.5, "--presence-penalty": -0.5, "--frequency-penalty": 0.75,
             "--min-tokens": 1, "--top-k": 4}  # fmt: skip
    argv = [text for flag, value in flags.items() for text in (flag, str(value))]
    code, _, err = _run(
        capsys, "generate", "--server", server.address, "abc", "--max-tokens", "2", "--logit-bias", "7=-3", *argv
    )
    assert (code, err) == (0, "")
    params = list(server.llm.params.values())[-1]
    for flag, value in flags.items():
        assert getattr(params, flag[2:].replace("-", "_")) == value
    assert dict(params.logit_bias) == {7: -3.0}


def test_info_and_health(capsys, server):
    code, out, _ = _run(capsys, "info", "--server", server.address)
    assert code == 0
    for words in (
        server.address,
        "ready",
        "slot 1, host b, pid 11, incarnation 2",
        "EchoForCausalLM",
        "3 per layer, top-2",
        "round_robin, 3, 2 experts of each layer by rank, 2 redundant ones per layer; 12 expert rows on further copies",
    ):
        assert words in out
    code, out, _ = _run(capsys, "info", "--server", server.address, "--json")
    facts = json.loads(out)
    assert (facts["state"], facts["model_info"]["vocab_size"], len(facts["ranks"])) == ("ready", 0x110000, 2)
    assert _run(capsys, "health", "--server", server.address) == (0, "serving\n", "")
    server.call(server.llm.become, EngineState.STALLED, "rank 1 is silent")
    try:
        assert _run(capsys, "health", "--server", server.address) == (1, "not serving\n", "")
        assert "stalled: rank 1 is silent" in _run(capsys, "info", "--server", server.address)[1]
    finally:
        server.call(server.llm.become, EngineState.READY)


def test_tokens_and_text(capsys, server):
    assert _run(capsys, "tokenize", "--server", server.address, "hé") == (0, "104 233\n", "")
    code, out, _ = _run(capsys, "tokenize", "--server", server.address, "hé", "--json")
    assert (code, json.loads(out)) == (0, {"token_ids": [104, 233], "count": 2, "text": "hé"})
    assert _run(capsys, "detokenize", "--server", server.address, "104", "233") == (0, "hé\n", "")
    code, out, err = _run(capsys, "detokenize", "--server", server.address, "99999999")
    assert (code, out) == (1, "")
    assert "token_ids=99999999: is outside the vocabulary" in err


def test_access_tokens(capsys, monkeypatch):
    with Serving(api_key=("s3cret",)) as server:
        for wrong in ([], ["--api-key", "wr0ng"]):
            code, out, err = _run(capsys, "info", "--server", server.address, *wrong)
            assert (code, out) == (1, "")
            assert "token" in err
            assert "wr0ng" not in err
            assert [line for line in err.splitlines() if " INFO " not in line] == err.splitlines()[-1:]
        assert _run(capsys, "info", "--server", server.address, "--api-key", "s3cret")[0] == 0
        monkeypatch.setenv("EPRUNTIME_API_KEY", "s3cret")
        assert _run(capsys, "generate", "--server", server.address, "ab", "--max-tokens", "2") == (0, "ab\n", "")


def test_tls(capsys, tmp_path):
    """Right files work; each kind of mismatch is said in one line, with what to give."""
    authority, other = Authority(tmp_path / "a", "ours"), Authority(tmp_path / "b", "others")
    cert, key = authority.issue("server")
    client_cert, client_key = authority.issue("client")
    files = {"ssl_certfile": str(cert), "ssl_keyfile": str(key), "ssl_ca_certs": str(authority.ca)}
    ca, pair = ["--tls-ca", str(authority.ca)], ["--tls-cert", str(client_cert), "--tls-key", str(client_key)]
    with Serving(**files) as server:
        ask = ["generate", "--server", server.address, "ab", "--max-tokens", "2", "--retries", "0", "--timeout", "20"]
        assert _run(capsys, *ask, *ca, *pair) == (0, "ab\n", "")
        for mistake in ([], ca, ["--tls"], ["--tls-ca", str(other.ca), *pair]):
            code, out, err = _run(capsys, *ask, *mistake)
            assert (code, out) == (1, ""), mistake
            assert "tls" in err.lower() or "certificate" in err, err
            assert err.count("\n") == 1, err
    for wrong, words in (
        (["--tls-cert", str(client_cert)], "cert and key go together"),
        (["--tls-ca", "/nonexistent"], "/nonexistent"),
        (["--model", "M", "--tls"], "--tls is for a server"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["generate", "x", *wrong])
        assert caught.value.code == 2
        assert words in capsys.readouterr().err


def test_tls_against_a_server_without(capsys, server):
    code, _, err = _run(capsys, "info", "--server", server.address, "--tls", "--retries", "0")
    assert code == 1
    assert "TLS" in err


def test_a_server_that_is_not_ready(capsys):
    with Serving(ready=False) as server:
        assert _run(capsys, "health", "--server", server.address) == (1, "not serving\n", "")
        code, out, _ = _run(capsys, "info", "--server", server.address)
        assert (code, "loading" in out) == (0, True)
        code, _, err = _run(capsys, "generate", "--server", server.address, "x", "--retries", "0")
        assert code == 1
        assert err.count("\n") == 1


def test_a_timeout_is_said(capsys):
    with Serving(FakeLLM(delay_s=0.05)) as server:
        code, _, err = _run(capsys, "generate", "--server", server.address, "x", "--timeout", "0.3")
        assert code == 1
        assert "the timeout passed" in err
