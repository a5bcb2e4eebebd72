"""A reverse proxy as small as one can be: it hands on what lies under a path, and says for whom, as nginx and others do."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "x-forwarded-host")
ADDRESS = "127.0.0.5"  # from which it asks


@contextlib.contextmanager
def reverse_proxy(behind: int, *, prefix: str, keeps_prefix: bool, forwards: bool = True) -> Iterator[int]:
    """The port at which `prefix`/… leads to the server on port `behind`. `keeps_prefix`: paths are handed on as they came; `forwards`: it says
    for whom and under which name it was asked."""

    class Proxy(BaseHTTPRequestHandler):
        def hand_on(self):
            if not f"{self.path}/".startswith(f"{prefix}/"):
                return self.send_error(404)
            path = self.path if keeps_prefix else self.path.removeprefix(prefix) or "/"
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            line = http.client.HTTPConnection("127.0.0.1", behind, timeout=120, source_address=(ADDRESS, 0))
            line.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            line.putheader("Host", f"127.0.0.1:{behind}")
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    line.putheader(name, value)
            if forwards:
                line.putheader("X-Forwarded-For", self.client_address[0])
                line.putheader("X-Forwarded-Host", self.headers["host"])
                line.putheader("X-Forwarded-Proto", "http")
            line.putheader("Content-Length", str(len(body)))
            line.endheaders(body)
            answer = line.getresponse()
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(OSError, http.client.HTTPException):  # the browser or the server went away
                while part := answer.read1(65536):  # as it comes: a stream of events is one answer
                    self.wfile.write(part)
                    self.wfile.flush()
            line.close()
            self.close_connection = True

        do_GET = do_POST = do_HEAD = hand_on

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
