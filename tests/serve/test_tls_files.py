"""load_tls: which certificate and key files a server starts with."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography")

from certificates import Authority

from epruntime.config import ServeConfig
from epruntime.errors import ConfigError
from epruntime.serve.tls import load_tls


def _config(certfile, keyfile, ca=None):
    return ServeConfig(
        ssl_certfile=str(certfile), ssl_keyfile=str(keyfile), ssl_ca_certs=None if ca is None else str(ca)
    )


def test_contents_and_absence(tmp_path):
    assert load_tls(ServeConfig()) is None
    authority = Authority(tmp_path, "a")
    certfile, keyfile = authority.issue("server")
    files = load_tls(_config(certfile, keyfile, authority.ca))
    assert (files.certificate_chain, files.private_key, files.client_authorities) == (
        certfile.read_bytes(), keyfile.read_bytes(), authority.ca.read_bytes()
    )  # fmt: skip
    assert "PRIVATE" not in repr(files)
    assert load_tls(_config(certfile, keyfile)).client_authorities is None


def test_refused_with_the_files_name(tmp_path):
    authority = Authority(tmp_path, "a")
    certfile, keyfile = authority.issue("one")
    _, other_key = authority.issue("two")
    _, locked = authority.issue("three", passphrase=b"secret")
    noise = tmp_path / "noise.pem"
    noise.write_text("not PEM")
    for config, words in (
        (_config(tmp_path / "gone.pem", keyfile), r"ssl_certfile='.*gone\.pem': cannot be read: No such file"),
        (_config(certfile, other_key), r"ssl_keyfile='.*two\.key' do not work"),
        (_config(noise, keyfile), r"noise\.pem"),
        (_config(certfile, locked), r"three\.key': the key is encrypted"),
        (_config(certfile, keyfile, noise), r"ssl_ca_certs='.*noise\.pem': not a file of PEM certificates"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_tls(config)
