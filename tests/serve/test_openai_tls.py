"""HTTP over TLS: who can read along, and which clients get in."""

from __future__ import annotations

import ssl

import httpx2
import openai
import pytest
from http_serving import HttpServing

pytest.importorskip("cryptography")

from certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"), "theirs")


def _context(authority: Authority, pair=None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    if pair is not None:
        context.load_cert_chain(*map(str, pair))
    return context


def _files(authority: Authority, **more: str) -> dict[str, str]:
    certfile, keyfile = authority.issue("server")
    return {"ssl_certfile": str(certfile), "ssl_keyfile": str(keyfile), **more}


def test_tls(authority, stranger):
    with HttpServing(api_key=("token",), **_files(authority)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        http = openai.DefaultHttpxClient(verify=_context(authority))
        with openai.OpenAI(base_url=server.url + "/v1", api_key="token", http_client=http) as client:
            stream = client.completions.create(model="echo", prompt="abc", max_tokens=5, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == "abcab"
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx2.get(server.url + "/health", verify=_context(stranger))
        with pytest.raises(httpx2.TransportError):
            httpx2.get(server.url.replace("https", "http") + "/health")


def test_mtls(authority, stranger):
    clients = authority
    with HttpServing(**_files(authority, ssl_ca_certs=str(clients.ca))) as server:
        url = server.url + "/health"
        assert httpx2.get(url, verify=_context(authority, clients.issue("client"))).status_code == 200
        for pair in (None, stranger.issue("client")):
            with pytest.raises(httpx2.TransportError):
                httpx2.get(url, verify=_context(authority, pair))
        assert httpx2.get(url, verify=_context(authority, clients.issue("another"))).status_code == 200
