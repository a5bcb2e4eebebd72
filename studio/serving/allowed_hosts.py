"""From where the page may be asked: under which names, and by which pages.

A page of another site that a browser of this machine shows can send requests here too, under this machine's address or under a
name of its own that it lets point here (DNS rebinding). Both are told by headers that no page can forge: `Host`, `Origin`, `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from studio.serving.request_origin import Asked, host_and_port, plain_address

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class Hosts:
    """`host` is what the page is bound to, `allowed` further names, `proxies` whose forwarded headers count."""

    host: str = "127.0.0.1"
    allowed: tuple[str, ...] = ()
    proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    def is_known(self, question: Asked) -> bool:
        """Whether the request names this studio. Where every address is listened to, the one it came in at counts too."""
        if question.host is None:
            return False
        name = _plain(question.host)
        if name in {_plain(known) for known in (*LOOPBACK, self.host, *self.allowed)}:
            return True
        return self.host.strip("[]") in EVERY_ADDRESS and name == plain_address(question.here)


def from_elsewhere(question: Asked) -> bool:
    """Whether a page of another origin asks. A link to the page itself may be followed from anywhere; nothing else may."""
    if any(not _same_origin(origin, question) for origin in question.origins) or len(question.origins) > 1:
        return True
    if question.site is None or question.site == "same-origin":
        return False
    if question.site == "none":  # typed, a bookmark, another program
        return question.changes_something
    return not (question.method in ("GET", "HEAD") and question.is_page_opened and question.path == "/")


def _same_origin(origin: str, question: Asked) -> bool:
    scheme, separator, rest = origin.strip().lower().partition("://")
    name, port = host_and_port(rest, scheme)
    return (
        bool(separator)
        and name is not None
        and (scheme, _plain(name), port) == (question.scheme, _plain(question.host), question.port)
    )


def _plain(name: str) -> str:
    return plain_address(name) or name.strip("[]").lower()
