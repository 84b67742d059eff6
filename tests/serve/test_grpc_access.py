"""Access tokens and TLS over real sockets; and what clients say where address, TLS or token do not fit."""

from __future__ import annotations

import asyncio
import http.server
import logging
import threading
from typing import Any

import grpc
import pytest

pytest.importorskip("cryptography")

from certificates import Authority
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from serving import Serving

from epruntime.client import AsyncClient, Client, Tls
from epruntime.errors import ConfigError, UnauthenticatedError, UnavailableError
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import keys

TOKENS = ("secret-one", "secret-two")


@pytest.fixture(scope="module")
def guarded():
    with Serving(api_key=TOKENS) as server:
        yield server


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"), "theirs")


@pytest.fixture(scope="module")
def tls_server(authority):
    certfile, keyfile = authority.issue("server")
    with Serving(ssl_certfile=str(certfile), ssl_keyfile=str(keyfile)) as server:
        yield server


@pytest.fixture(scope="module")
def mtls_server(authority):
    certfile, keyfile = authority.issue("server")
    with Serving(ssl_certfile=str(certfile), ssl_keyfile=str(keyfile), ssl_ca_certs=str(authority.ca)) as server:
        yield server


def _fails(kind: type[Exception], words: str, address: str, **options: Any) -> None:
    with Client(address, timeout=10, **options) as client, pytest.raises(kind, match=words):
        client.generate("abc")


def _every_method(client: Client):
    yield lambda: client.generate("abc", max_tokens=3)
    yield lambda: list(client.stream("abc", max_tokens=3))
    yield lambda: client.info()
    yield lambda: client.model_info()
    yield lambda: client.tokenize("abc")
    yield lambda: client.detokenize([97])


@pytest.mark.parametrize("token", TOKENS)
def test_each_token_opens_every_method(guarded, token):
    with Client(guarded.address, api_key=token, timeout=10) as client:
        assert client.generate("abc", max_tokens=3).text == "abc"
        for call in _every_method(client):
            call()


@pytest.mark.parametrize(
    ("token", "words"),
    [("", "wants an access token.*EPRUNTIME_API_KEY"), ("secret-on", "not one of"), ("secret-one2", "not one of")],
)
def test_no_token_or_a_wrong_one_opens_none(guarded, caplog, token, words):
    with caplog.at_level(logging.DEBUG), Client(guarded.address, api_key=token, timeout=10) as client:
        for call in _every_method(client):
            with pytest.raises(UnauthenticatedError, match=words) as caught:
                call()
            assert caught.value.__cause__.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not guarded.llm.live

    async def main() -> None:
        async with AsyncClient(guarded.address, api_key=token, timeout=10) as client:
            with pytest.raises(UnauthenticatedError):
                await client.generate("abc")

    asyncio.run(main())
    assert "refused a call" in caplog.text
    assert not any(text in caplog.text for text in (*TOKENS, "secret-on"))


def test_health_is_open_and_all_else_is_not(guarded):
    with Client(guarded.address, api_key="", timeout=10) as client:
        assert client.health() == "serving"
    with grpc.insecure_channel(guarded.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        with pytest.raises(grpc.RpcError) as caught:
            list(reflect(iter([question]), timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = ((keys.AUTHORIZATION, f"bearer {TOKENS[1]}"),)  # RFC 7235: the scheme's case does not matter
        assert list(reflect(iter([question]), timeout=10, metadata=metadata))
        # a method that does not exist tells nothing to strangers
        for method in ("/epruntime.v1.Inference/Nothing", "/other.Service/Method"):
            unknown = channel.unary_unary(method, empty_pb2.Empty.SerializeToString, empty_pb2.Empty.FromString)
            for sent, code in ((None, grpc.StatusCode.UNAUTHENTICATED), (metadata, grpc.StatusCode.UNIMPLEMENTED)):
                with pytest.raises(grpc.RpcError) as caught:
                    unknown(empty_pb2.Empty(), timeout=10, metadata=sent)
                assert caught.value.code() is code


@pytest.mark.parametrize(
    "sent",
    [
        (("authorization", "secret-one"),),
        (("authorization", "Basic secret-one"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer secret-one"), ("authorization", "Bearer wrong")),
        (("authorization", "Bearer wrong"), ("authorization", "Bearer secret-one")),
        (("x-api-key", "secret-one"),),
    ],
)
def test_other_forms_of_a_token_are_refused(guarded, sent):
    with grpc.insecure_channel(guarded.address) as channel:
        call = channel.unary_unary(
            f"/{keys.SERVICE}/GetServerInfo", pb.GetServerInfoRequest.SerializeToString, lambda data: data
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(pb.GetServerInfoRequest(), timeout=10, metadata=sent)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_token_of_the_environment(monkeypatch):
    monkeypatch.setenv("EPRUNTIME_API_KEY", "from-outside")
    with Serving() as server:
        with Client(server.address, timeout=10) as client:
            assert client.generate("abc", max_tokens=3).text == "abc"
        with Client(server.address, api_key="", timeout=10) as client, pytest.raises(UnauthenticatedError):
            client.info()
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        Client("127.0.0.1:1", api_key="two\nlines")
    assert "lines" not in str(caught.value)


def test_tls(tls_server, authority):
    with Client(tls_server.address, tls=Tls(ca=authority.ca), timeout=10) as client:
        assert client.generate("abc", max_tokens=3).text == "abc"
        assert client.health() == "serving"
    named = "localhost:" + tls_server.address.rpartition(":")[2]

    async def main() -> None:
        async with AsyncClient(named, tls=Tls(ca=authority.ca), timeout=10) as client:
            assert (await client.generate("abc", max_tokens=3)).text == "abc"

    asyncio.run(main())


def test_mtls(mtls_server, authority, stranger):
    cert, key = authority.issue("client")
    with Client(mtls_server.address, tls=Tls(ca=authority.ca, cert=cert, key=key), timeout=10) as client:
        assert client.generate("abc", max_tokens=3).text == "abc"
    other_cert, other_key = stranger.issue("client")
    for tls in (Tls(ca=authority.ca), Tls(ca=authority.ca, cert=other_cert, key=other_key)):
        with Client(mtls_server.address, tls=tls, timeout=10, retries=0) as client:
            with pytest.raises(UnavailableError, match=r"closed the connection.*cert and key"):
                client.generate("abc")
            with pytest.raises(UnavailableError):  # health has no token, but TLS comes before it
                client.health()


def test_tokens_over_tls(authority):
    certfile, keyfile = authority.issue("server")
    with Serving(ssl_certfile=str(certfile), ssl_keyfile=str(keyfile), api_key=TOKENS) as server:
        with Client(server.address, tls=Tls(ca=authority.ca), api_key=TOKENS[0], timeout=10) as client:
            assert client.generate("abc", max_tokens=3).text == "abc"
        with (
            Client(server.address, tls=Tls(ca=authority.ca), api_key="", timeout=10) as client,
            pytest.raises(UnauthenticatedError),
        ):
            client.info()


def test_a_certificate_of_strangers_or_for_another_host(tls_server, authority, stranger):
    for tls in (True, Tls(), Tls(ca=stranger.ca)):
        _fails(ConfigError, r"not signed by an authority.*tls=Tls\(ca=FILE\)", tls_server.address, tls=tls)
    certfile, keyfile = authority.issue("elsewhere", host="10.0.0.1")
    with Serving(ssl_certfile=str(certfile), ssl_keyfile=str(keyfile)) as server:
        _fails(ConfigError, "another host name", server.address, tls=Tls(ca=authority.ca))
        with Client(server.address, tls=Tls(ca=authority.ca, server_name="10.0.0.1"), timeout=10) as client:
            assert client.health() == "serving"


def test_tls_and_plain_text_do_not_mix(guarded, tls_server, authority):
    _fails(ConfigError, "does not speak TLS", guarded.address, tls=Tls(ca=authority.ca))
    _fails(UnavailableError, r"closed the connection.*want TLS", tls_server.address, retries=0)


def test_an_http_port_is_named_as_such():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            _fails(ConfigError, r"speaks HTTP, not gRPC.*--grpc-port", f"127.0.0.1:{web.server_address[1]}")
        finally:
            web.shutdown()
            thread.join()


def test_files_that_cannot_be_used(tmp_path, authority):
    certfile, _ = authority.issue("client")
    for tls, words in (
        (Tls(ca=tmp_path / "gone.pem"), r"ca='.*gone\.pem': cannot be read: No such file"),
        (Tls(ca=__file__), r"ca='.*test_grpc_access\.py': is not a PEM file"),
        (Tls(ca=authority.ca, cert=certfile), "cert and key go together"),
    ):
        with pytest.raises(ConfigError, match=words):
            Client("127.0.0.1:1", tls=tls)
    for address in ("http://127.0.0.1:1", "127.0.0.1", "127.0.0.1:http", ":50051"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            Client(address)


def test_nothing_listens():
    for tls in (None, Tls()):
        with Client("127.0.0.1:1", tls=tls, timeout=10, retries=0) as client:
            with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 \(connection refused\).*epruntime serve"):
                client.generate("abc")
            with pytest.raises(UnavailableError):
                client.health()
    _fails(UnavailableError, "host name is not known", "no-such-host.invalid:1", retries=0)

    async def main() -> None:
        async with AsyncClient("127.0.0.1:1", timeout=10, retries=0) as client:
            with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
                await client.info()

    asyncio.run(main())
