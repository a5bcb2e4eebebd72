"""Puts the page on a port: Gradio's application, with the studio's own answers for files and uploads, behind the guard."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import logging.handlers
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from backend.schema.messages import Trouble
from studio.serving.allowed_hosts import Hosts
from studio.serving.api_calls import Calls
from studio.serving.credentials import Keys
from studio.serving.file_answers import file_answer
from studio.serving.guard import Guard
from studio.serving.sessions import MOST_SESSIONS, Sessions
from studio.serving.uploads import clean, upload_answer
from studio.state.context import Studio
from studio.widgets import theme

CLEAN_EVERY_SECONDS = 3600
START_SECONDS = 60
# What of Gradio's the page uses. The rest is not served: logins and files of its own, requests to other hosts, recordings, monitoring, the
# writing of code, and whatever a later version adds.
SERVED = re.compile(
    r"/|/(config|theme\.css|robots\.txt|favicon\.ico|manifest\.json)/?|/(static|assets|svelte)/.*"
    r"|/gradio_api/(app_id|info|user|login_check|openapi\.json|theme\.css|startup-events|upload_progress|cancel|reset|queue/(join|data|status))/?"
    r"|/gradio_api/(run|api|heartbeat)/[^/]+/?"
)
NO_QUERY = (b"page", b"deep_link")
MOST_NAME_BYTES = 255


def application(studio: Studio, page: gr.Blocks, *, keys: Keys, hosts: Hosts) -> Guard:
    """The whole server as an ASGI application; the guard, and what stands behind it."""
    page.state_session_capacity = MOST_SESSIONS
    for function in page.fns.values():
        # Else each is described, with paths of this machine, to whoever opens the page.
        function.api_visibility = "private"
    page.preprocess_data = _told_of_values(page.preprocess_data)
    outer = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan(studio), routes=_own_routes(studio, page)
    )
    gr.mount_gradio_app(
        outer,
        page,
        path="/",
        root_path=studio.root_path,
        allowed_paths=[str(folder) for folder in studio.served],
        theme=theme.theme(),
        css_paths=[theme.STYLESHEET],
        head=theme.HEAD,
        footer_links=[],
        run_history=False,
        show_error=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None, "middleware": [Middleware(_OnlyServed)]},
    )
    inner = next(route.app for route in outer.routes if isinstance(route, Mount))
    inner.state_holder = Sessions()
    inner.state_holder.set_blocks(page)
    return Guard(Calls(outer, page.fns, studio.uploads), keys=keys, hosts=hosts, root_path=studio.root_path)


def _told_of_values(preprocess: Callable) -> Callable:
    """`preprocess`, which raises `gr.Error` for a value that its field does not take: a mistake of the caller's, not an answer of 500."""

    @functools.wraps(preprocess)
    async def told(*values, **more):
        try:
            return await preprocess(*values, **more)
        except gr.Error:
            raise
        except Exception as error:
            logging.getLogger(__name__).warning("A field refused the value that a call gave it: %r", error)
            raise gr.Error("A value is none that its field takes.", print_exception=False) from None

    return told


def _own_routes(studio: Studio, page: gr.Blocks) -> list[Route]:
    """The answers that come before Gradio's."""
    uploads = studio.uploads
    files = file_answer(lambda: (*studio.served, uploads))
    take = upload_answer(page, uploads, studio.preferences)
    return [
        Route("/gradio_api/file={path:path}", files, methods=["GET"]),
        Route("/gradio_api/file/{path:path}", files, methods=["GET"]),
        Route("/gradio_api/upload", take, methods=["POST"]),
        Route("/gradio_api/upload/", take, methods=["POST"]),
    ]


class _OnlyServed:
    """ASGI middleware around Gradio's application: what is not used of it is not there, nor are pages and links of which there are none."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            long = any(len(part.encode("utf-8", "replace")) > MOST_NAME_BYTES for part in scope["path"].split("/"))
            if long or not SERVED.fullmatch(scope["path"]):
                return await PlainTextResponse("Not found.", status_code=404)(scope, receive, send)
            kept = [part for part in scope["query_string"].split(b"&") if part.partition(b"=")[0] not in NO_QUERY]
            scope = {**scope, "query_string": b"&".join(kept)}
        await self.app(scope, receive, send)


def _lifespan(studio: Studio) -> Callable:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_clean_for_ever(studio))
        yield
        task.cancel()

    return lifespan


async def _clean_for_ever(studio: Studio) -> None:
    while True:
        await asyncio.to_thread(clean, studio.uploads)
        await asyncio.sleep(CLEAN_EVERY_SECONDS)


def start(app: Guard, host: str, port: int) -> int:
    """Serves `app` in a thread of its own, once it answers. Returns the port. Raises OSError where it cannot be had."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        log_level="error",  # a warning is a line for each request that is none, from anybody
        access_log=False,  # it would hold the token
        proxy_headers=False,  # the guard reads those, from proxies that are trusted
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, args=([listener],), name="server", daemon=True).start()
    end = time.monotonic() + START_SECONDS
    while not server.started:
        if server.should_exit or time.monotonic() > end:
            raise Trouble("not_started", "The page's server did not start.", hint="What it said is above.")
        time.sleep(0.005)
    return listener.getsockname()[1]


def _listen(host: str, port: int) -> socket.socket:
    name = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET, socket.SOCK_STREAM)
    if os.name != "nt":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((name, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


class _OwnersLog(logging.handlers.RotatingFileHandler):
    """A log for its owner's eyes alone. Where no regular file can be opened (a pipe, a folder), the line is in the terminal only."""

    def _open(self):
        # Opened so, a pipe that nobody reads does not hold the server up.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
        handle = os.open(self.baseFilename, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(f"{self.baseFilename} is no regular file")
            if hasattr(os, "fchmod"):  # it may be of an older version
                os.fchmod(handle, 0o600)
            return os.fdopen(handle, "a", encoding=self.encoding, errors="backslashreplace")
        except OSError:
            os.close(handle)
            raise

    def handleError(self, record):
        """Says nothing: the terminal has the line."""


def keep_log(studio: Studio, name: str) -> None:
    """What is told to the logger `loft.NAME` goes to the terminal and to `user/NAME.log`, which holds half a MiB at most."""
    log = logging.getLogger(f"loft.{name}")
    log.setLevel(logging.INFO)
    log.propagate = False
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    with contextlib.suppress(OSError):  # the terminal alone, then
        studio.places.user.mkdir(parents=True, exist_ok=True)
        path = studio.places.user / f"{name}.log"
        handlers.append(_OwnersLog(path, maxBytes=2**18, backupCount=1, encoding="utf-8", delay=True))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.handlers[:] = handlers
