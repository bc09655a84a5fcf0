"""Who may ask: pages of this server, opened on this machine, or by who has the token.

A name of somebody else's that is made to resolve to this machine (DNS rebinding) comes with a Host header that is not
this server's; a page of somebody else's comes with its own Origin, or says that it is cross-site.
"""

import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "sae-token-{port}"  # browsers send a host's cookies to all its ports
HTTP_PORT = 80  # which addresses and Host headers leave out
MOST_BYTES = 1 << 20  # of a request's body
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests by status 403, 413 or 415 with a sentence; adds headers to all answers.

    Args:
        token: must come as a cookie, which `/?token=` sets; None if everybody on the machine may ask, by its own names.
    """

    def __init__(self, app: ASGIApp, port: int, token: str | None) -> None:
        self._app, self._token = app, token
        self._cookie = COOKIE.format(port=port)
        self._hosts = {f"{name}:{port}" for name in LOOPBACK}
        if port == HTTP_PORT:
            self._hosts.update(LOOPBACK)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # WebSockets, which nothing here speaks
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._admission(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        if self._token is None and host not in self._hosts:
            return refused(403, "this server is not at the address that was asked for")
        foreign = origin is not None and origin.partition("://")[2] != host
        # A link from elsewhere may open the page itself, which asks for nothing.
        linked = scope["path"] == "/" and scope["method"] == "GET"
        other_site = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign or (other_site and not linked):
            return refused(403, "this page may not ask here: only this server's own pages may")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip()
            if kind != "application/json":
                return refused(415, "expected a body of type application/json")
            length = headers.get("content-length", "")
            if not length.isascii() or not length.isdigit() or int(length) > MOST_BYTES:
                return refused(
                    413, f"expected a body of a stated length, at most {MOST_BYTES:,} bytes"
                )
        return None

    def _admission(self, scope: Scope) -> Response | None:
        """The answer to who comes with the token in the address, or without it."""
        if self._token is None or self._is_token(_cookie(Headers(scope=scope), self._cookie)):
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_token(given):
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(self._cookie, given, httponly=True, samesite="strict", path="/")
            return response
        return refused(403, "open the address with the token that `sae serve` printed")

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), str(self._token).encode())


def refused(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status)


def _cookie(headers: Headers, name: str) -> str:
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if cookie is None else cookie.value
