"""Routes: JSON that the workbench returns, texts that grow as server-sent events, and the page itself.

One forward pass at a time, in the order in which pages ask; a text that grows asks for each token. A request whose page
has left is dropped before its turn.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from ...base.errors import ConfigError, SaeError
from ...base.files import parse_json, to_json
from ...base.machine import is_out_of_memory
from ..report import LATENT_SCRIPTS, live_page, page_of, script_of, style_sheet
from .guard import Guard, refused
from .requests import ToContinue, ToLabel, ToRead
from .workbench import Workbench

Result = TypeVar("Result")
MOST_WAITING = 32  # requests; more are refused
SERVE_SCRIPTS = (
    *LATENT_SCRIPTS,
    *("reading.js", "steering.js", "runs.js", "serve.js"),
)
GONE = 499  # nobody reads it


class Turns:
    """Forward passes one after another, first come, first served."""

    def __init__(self) -> None:
        self._lock, self._waiting = asyncio.Lock(), 0

    async def take(self, request: Request, work: Callable[[], Result]) -> Result:
        if self._waiting >= MOST_WAITING:
            raise HTTPException(429, f"{MOST_WAITING} requests wait already; try again later")
        self._waiting += 1
        try:
            async with self._lock:
                if await request.is_disconnected():
                    raise HTTPException(GONE, "the page has left")
                return await run_in_threadpool(work)
        finally:
            self._waiting -= 1


class Pages:
    """The routes' functions."""

    def __init__(self, workbench: Workbench) -> None:
        self._bench, self._turns = workbench, Turns()

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/app.js", self.script),
            Route("/style.css", self.style),
            Route("/frozen.html", self.frozen),
            Route("/api/about", self.about),
            Route("/api/overview", self.overview),
            Route("/api/latent", self.latent),
            Route("/api/runs", self.runs),
            Route("/api/curves", self.curves),
            Route("/api/read", self.read, methods=["POST"]),
            Route("/api/steer", self.steer, methods=["POST"]),
            Route("/api/label", self.label, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        return HTMLResponse(live_page("serve", "sae serve"))

    async def script(self, request: Request) -> Response:
        return Response(script_of(SERVE_SCRIPTS), media_type="text/javascript")

    async def style(self, request: Request) -> Response:
        return Response(style_sheet(), media_type="text/css")

    async def frozen(self, request: Request) -> Response:
        """A page with everything in it but the answers, which the page that saves itself puts in."""
        return HTMLResponse(page_of("serve", "sae serve", SERVE_SCRIPTS, None))

    async def about(self, request: Request) -> Response:
        return _json(self._bench.about)

    async def overview(self, request: Request) -> Response:
        sae = self._bench.sae(_asked(request, "run"))
        return _json(await run_in_threadpool(sae.overview))

    async def latent(self, request: Request) -> Response:
        sae, number = self._bench.sae(_asked(request, "run")), _asked(request, "latent")
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise ConfigError("expected a latent's number, from 0")
        return _json(await run_in_threadpool(sae.latent, int(number)))

    async def runs(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._bench.runs))

    async def curves(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._bench.curves, _asked(request, "run")))

    async def read(self, request: Request) -> Response:
        asked = await _body(request, ToRead)
        sae = self._bench.sae(asked.run)
        return _json(await self._turns.take(request, lambda: sae.read(asked)))

    async def label(self, request: Request) -> Response:
        asked = await _body(request, ToLabel)
        sae = self._bench.sae(asked.run)
        return _json(await self._turns.take(request, lambda: sae.label(asked)))

    async def steer(self, request: Request) -> Response:
        asked = await _body(request, ToContinue)
        sae = self._bench.sae(asked.run)
        texts = await self._turns.take(request, lambda: sae.continuation(asked))
        events = self._growing(request, texts.events())
        return StreamingResponse(events, media_type="text/event-stream")

    async def _growing(
        self, request: Request, events: Iterator[dict[str, Any]]
    ) -> AsyncIterator[str]:
        try:
            while event := await self._turns.take(request, lambda: next(events, None)):
                yield f"data: {to_json(event)}\n\n"
        except (SaeError, HTTPException) as error:  # the status has been sent
            yield f"data: {to_json({'error': getattr(error, 'detail', str(error))})}\n\n"


def _json(document: dict[str, Any]) -> Response:
    return Response(to_json(document), media_type="application/json")


def _asked(request: Request, name: str) -> str:
    if name not in request.query_params:
        raise ConfigError(f"expected {name} in the address")
    return request.query_params[name]


async def _body(request: Request, kind: type[Result]) -> Result:
    body = await request.body()
    try:
        return parse_json(body, kind)
    except ValueError as error:
        raise ConfigError(f"cannot read the request: {error}") from error


async def _on_failure(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return refused(error.status_code, error.detail)
    return refused(422, " ".join(str(error).split()))


async def _on_out_of_memory(request: Request, error: Exception) -> Response:
    if not is_out_of_memory(error):
        raise error
    return refused(503, "out of memory; use a shorter text")


def application(workbench: Workbench, port: int, token: str | None) -> Starlette:
    return Starlette(
        routes=Pages(workbench).routes,
        middleware=[Middleware(Guard, port=port, token=token)],
        exception_handlers={
            SaeError: _on_failure,
            HTTPException: _on_failure,
            RuntimeError: _on_out_of_memory,
        },
    )


def run_server(app: Starlette, listening: socket.socket) -> None:
    """Answer at a socket until Ctrl-C."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[listening])
