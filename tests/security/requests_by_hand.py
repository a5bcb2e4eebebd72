"""Requests as nobody's browser would send them, and what came back."""

from __future__ import annotations

import http.client
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def cookie(self) -> str:
        """The cookie that was set, as it is sent back."""
        return self.headers.get("set-cookie", "").partition(";")[0]


def ask(port: int, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str) -> Reply:
    """One request. Underscores in names of headers are hyphens; `Host` is as usual unless it is given."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    said = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.putrequest(method, path, skip_host="Host" in said, skip_accept_encoding=True)
        for name, value in said.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        # A stream of events has no end: its first bytes are enough.
        streams = "event-stream" in answer.getheader("content-type", "")
        return Reply(
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read1(1000) if streams else answer.read(),
        )
    finally:
        connection.close()


def send_raw(port: int, data: bytes) -> bytes:
    """What comes back, up to the connection's end, for bytes that may be no request at all."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(data)
        found = b""
        while more := line.recv(65536):
            found += more
        return found


def form_of(*files: tuple[str, bytes], field: str = "files", boundary: str = "edge") -> tuple[bytes, str]:
    """A multipart body with these (name, content) and its content type."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'.encode(
            "utf-8", "surrogateescape"
        )
        + content
        + b"\r\n"
        for name, content in files
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
