"""What the command line says to people: help where nothing was asked, no words of Python, numbers that agree."""

from __future__ import annotations

import argparse
import re

import pytest

from epruntime.cli import hints
from epruntime.cli.main import main, make_parser
from epruntime.cli.models import table
from epruntime.errors import InvalidRequestError, QueueFullError
from epruntime.words import counted


def _commands() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def test_nothing_asked_prints_the_help(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: epruntime")
    for command in _commands():
        assert re.search(rf"^ +{command}\b", err, re.MULTILINE), command


@pytest.mark.parametrize("command", sorted(_commands()))
def test_help_has_no_words_of_python(command):
    """A user of the command line does not know None, True or a function's name."""
    text = _commands()[command].format_help()
    assert re.findall(r"\b(?:None|True|False|dict|tuple|ValueError|TypeError)\b|\w+\(\w[^)]*\)`", text) == []


@pytest.mark.parametrize(
    ("number", "nouns", "words"),
    [
        (0, ("token",), "0 tokens"),
        (1, ("token",), "1 token"),
        (2, ("token",), "2 tokens"),
        (1, ("copy", "copies"), "1 copy"),
        (3, ("copy", "copies"), "3 copies"),
    ],
)
def test_counted(number, nouns, words):
    assert counted(number, *nouns) == words


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:8000", True),
        ("[::1]:50051", True),
        ("node-a.example.org:443", True),
        ("10.0.0.2:99999", False),
        ("12:30", False),
        ("Note:42", False),
        ("chapter.verse 3:16", False),
        ("http://127.0.0.1:80", False),
        ("a ratio of 3.5:10", False),
        ("", False),
    ],
)
def test_is_address(text, address):
    assert hints.is_address(text) is address


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "127.0.0.1:50051", "Once upon a time"],
        ["generate", "localhost:50051"],
        ["tokenize", "127.0.0.1:50051"],
        ["tokenize", "127.0.0.1:50051", "some text"],
        ["detokenize", "127.0.0.1:50051", "17"],
        ["serve", "--port", "1", "M", "127.0.0.1:50051"],
    ],
)
def test_an_address_where_none_is_taken_names_the_flag(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert ("--server HOST:PORT" in err) == (argv[0] != "serve")


@pytest.mark.parametrize("command", ["info", "health", "chat"])
def test_one_address_is_enough(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "127.0.0.1:1", "--server", "127.0.0.1:2"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_hint_of_the_server_is_told():
    assert hints.in_words(QueueFullError("the queue is full", retry_after_s=2.5)).endswith("again in 2.5 s)")
    assert hints.in_words(InvalidRequestError("too long")) == "too long"


def test_the_table_of_models_says_what_its_words_mean(capsys, monkeypatch):
    from epruntime.models import survey

    found = [
        survey.Verdict(model_type=name, architecture="A", served=bool(how), how=how, reason="" if how else "why not")
        for name, how in (("a", "hooked"), ("b", "adapted"), ("c", ""))
    ]
    monkeypatch.setattr(survey, "survey", lambda only: found)
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    shown = {line.split()[1] for line in table([v.to_dict() for v in found]).splitlines()[1:]}
    assert shown == {"hooked", "adapted", "no"}
    for word in shown:
        assert f'"{word}" - ' in " ".join(out.split())
