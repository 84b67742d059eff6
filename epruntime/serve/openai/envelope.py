"""What surrounds every request: its id, who may call, and errors in one form."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epruntime.serve.access import AccessCheck
from epruntime.serve.openai.errors import HttpError, http_error

REQUEST_ID = "X-Request-Id"
#: Paths that need no token: probes have none.
OPEN = frozenset({"/health", "/ping", "/version"})
_ID = re.compile(r"[!-~]{1,128}")


class Envelope:
    """Gives each request an id, and turns whatever is raised before an answer has begun into one.

    `X-Request-Id` of the caller comes back with the answer; it is in `request.state.given_id` ("": none, or not 1 to
    128 printable ASCII characters without spaces). `request.state.request_id` is that, or a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        given = given if _ID.fullmatch(given) else ""
        request_id = given or uuid.uuid4().hex
        scope.setdefault("state", {}).update(given_id=given, request_id=request_id)
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001  every failure must reach the client as a status
            failure = http_error(error, request_id)
            if begun:
                return  # the connection is closed on an answer that was left unfinished
            await failure.response()(scope, receive, send_with_id)


class Access:
    """Lets calls pass that bring a token, where tokens are needed, and those of OPEN paths."""

    def __init__(self, app: ASGIApp, check: AccessCheck) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN and not self._check.allows(Headers(scope=scope).get("Authorization")):
            raise HttpError(
                401,
                "no valid access token: send the header 'Authorization: Bearer TOKEN'",
                headers={"WWW-Authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)
