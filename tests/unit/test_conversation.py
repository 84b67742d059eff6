"""A chat's conversation: what is remembered, and what happens to it when an answer fails or is stopped."""

from __future__ import annotations

import builtins
import io
import sys

import pytest

from epruntime.cli.conversation import COMMANDS, Conversation
from epruntime.client import Chunk
from epruntime.errors import InvalidRequestError, RankLostError, UnavailableError


class ScriptedClient:
    """Its chat answers as the script says: texts, and errors (KeyboardInterrupt, too), in order."""

    def __init__(self, *answers: list) -> None:
        self.answers, self.asked, self.closed = list(answers), [], 0

    def chat(self, messages, *, stream, **sampling):
        assert stream
        self.asked.append([dict(message) for message in messages])
        return ScriptedStream(self, self.answers.pop(0))


class ScriptedStream:
    def __init__(self, client: ScriptedClient, pieces: list) -> None:
        self._client, self._pieces = client, pieces

    def __iter__(self):
        for number, piece in enumerate(self._pieces):
            if not isinstance(piece, str):
                raise piece
            last = number == len(self._pieces) - 1
            yield Chunk(request_id="r", text=piece, finish_reason="stop" if last else None)

    def close(self) -> None:
        self._client.closed += 1


def _talk(monkeypatch, client: ScriptedClient, *lines: str | type[BaseException], system: str | None = None) -> int:
    script = iter(lines)

    def read(prompt: str) -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    return Conversation(client, {}, system, interactive=True).run()


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_it_remembers(monkeypatch, capsys):
    client = ScriptedClient(["a", "b"], ["c"])
    assert _talk(monkeypatch, client, "one", "", "two", "/exit") == 0
    assert client.asked == [[_user("one")], [_user("one"), _answer("ab"), _user("two")]]
    assert capsys.readouterr().out == "ab\nc\n\n"


def test_clear_and_system(monkeypatch):
    client = ScriptedClient(["a"], ["b"], ["c"], ["d"])
    _talk(
        monkeypatch,
        client,
        "one",
        "/system speak French  ",
        "two",
        "/clear",
        "three",
        "/system",
        "four",
        system="brief",
    )
    old, new = {"role": "system", "content": "brief"}, {"role": "system", "content": "speak French"}
    assert client.asked == [
        [old, _user("one")],
        [new, _user("one"), _answer("a"), _user("two")],
        [new, _user("three")],
        [_user("three"), _answer("c"), _user("four")],
    ]


def test_retry_takes_the_place_of_the_answer(monkeypatch, capsys):
    client = ScriptedClient(["a"], ["b"], ["c"])
    _talk(monkeypatch, client, "/retry", "one", "/retry", "two")
    assert client.asked == [[_user("one")], [_user("one")], [_user("one"), _answer("b"), _user("two")]]
    assert "nothing was asked yet" in capsys.readouterr().err


def test_a_server_that_goes_away_costs_one_answer(monkeypatch, capsys):
    gone = UnavailableError("no epruntime server answers")
    client = ScriptedClient(["a"], ["half", gone], ["b"], [RankLostError(slot=1, host="h", detail="x")], ["c"])
    assert _talk(monkeypatch, client, "one", "two", "/retry", "three", "four") == 0
    begin = [_user("one"), _answer("a")]
    assert client.asked[1:3] == [[*begin, _user("two")]] * 2
    assert client.asked[4] == [*begin, _user("two"), _answer("b"), _user("four")]  # "three" was not answered
    err = capsys.readouterr().err
    assert "epruntime chat: no epruntime server answers\n" in err
    assert err.count("The conversation is kept: /retry asks again") == 2
    assert client.closed == 5


def test_a_retry_that_fails_leaves_the_answer_before(monkeypatch):
    client = ScriptedClient(["a"], [UnavailableError("away")], ["b"])
    _talk(monkeypatch, client, "one", "/retry", "two")
    assert client.asked[2] == [_user("one"), _answer("a"), _user("two")]


def test_ctrl_c(monkeypatch, capsys):
    """In an answer it is kept as far as it went; before its first word the question goes; at the prompt, a hint."""
    client = ScriptedClient(["he", KeyboardInterrupt()], [KeyboardInterrupt()], ["c"])
    assert _talk(monkeypatch, client, KeyboardInterrupt, "one", "two", "three") == 0
    assert client.asked[2] == [_user("one"), _answer("he"), _user("three")]
    out = capsys.readouterr().out
    assert out.startswith("\n(Ctrl-D or /exit leaves)\nhe [stopped]\n[stopped: the question is forgotten]\nc\n")
    assert client.closed == 3


def test_a_refused_question_is_not_remembered(monkeypatch, capsys):
    client = ScriptedClient([InvalidRequestError("too long", field="messages")], ["a"])
    _talk(monkeypatch, client, "long", "short")
    assert client.asked[1] == [_user("short")]
    assert "The conversation is kept" not in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/frobnicate", "/help"])
def test_other_commands_are_not_sent(monkeypatch, capsys, line):
    client = ScriptedClient()
    _talk(monkeypatch, client, line)
    assert COMMANDS in "".join(capsys.readouterr())
    assert client.asked == []


def test_a_line_that_is_no_command_is_sent(monkeypatch):
    client = ScriptedClient(["a"])
    _talk(monkeypatch, client, "/etc/hosts: what is it?")
    assert client.asked == [[_user("/etc/hosts: what is it?")]]


def test_piped_input_fails_loudly(monkeypatch, capsys):
    client = ScriptedClient([UnavailableError("away")], ["b"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert Conversation(client, {}, None, interactive=False).run() == 1
    assert client.asked[1] == [_user("two")]
    out, err = capsys.readouterr()
    assert (out, err) == ("b\n", "epruntime chat: away\n")
