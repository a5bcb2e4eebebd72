"""Who gets in: whoever has the token, or has logged in. What is asked for is compared in constant time and kept as digests only."""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from backend.host.access_token import ticket_number
from studio.serving.request_origin import Asked

COOKIE_SECONDS = 400 * 24 * 3600  # the longest that browsers keep one
LOGIN_SECONDS = 30 * 24 * 3600
MOST_LOGINS = 1000


class Keys:
    """The token ("" where none is asked for), the logins (none: no passwords), and who has logged in since the start.

    With neither, everybody gets in: `--no-token`, on loopback alone.
    """

    def __init__(self, token: str, logins: Sequence[tuple[str, str]] = (), clock: Callable[[], float] = time.monotonic):
        self._token = _digest("token", token) if token else b""
        self._ticket_number = functools.partial(ticket_number, token) if token else lambda text: ""
        self._used: OrderedDict[str, None] = OrderedDict()  # tickets; an old one is refused for its age
        self._logins = tuple((user, _digest("login", user, password)) for user, password in logins)
        # A cookie is sent to every port of a host. Its name is made from the token, so that studios beside each other do not take
        # away each other's; its value is no token, so that another program of this host that is sent it does not learn that.
        secret = token or secrets.token_urlsafe(32)
        self.cookie = f"loft-{_digest('cookie name', secret).hex()[:12]}"
        self._holder = _digest("cookie", secret).hex() if token else ""
        self._since: OrderedDict[str, float] = OrderedDict()
        self._clock, self._lock = clock, threading.Lock()

    @property
    def asks_for_login(self) -> bool:
        return bool(self._logins)

    @property
    def open_to_all(self) -> bool:
        return not self._token and not self._logins

    def lets_in(self, question: Asked) -> bool:
        """Whether the request carries a key: the cookie of one, or the token itself in `Authorization: Bearer`."""
        if self.open_to_all or (question.bearer and self.is_token(question.bearer)):
            return True
        return any(name == self.cookie and self._is_cookie(value) for name, value in question.cookies)

    def is_token(self, text: str) -> bool:
        return bool(self._token) and hmac.compare_digest(_digest("token", text), self._token)

    def takes_ticket(self, text: str) -> bool:
        """Whether this is a ticket that nobody has used; it is used then."""
        number = self._ticket_number(text)
        with self._lock:
            if not number or number in self._used:
                return False
            self._used[number] = None
            while len(self._used) > MOST_LOGINS:
                self._used.popitem(last=False)
        return True

    def is_login(self, user: str, password: str) -> bool:
        """Whether user and password belong together. An unknown user takes as long as a wrong password."""
        tried, found = _digest("login", user, password), False
        for _, known in self._logins:
            found |= hmac.compare_digest(tried, known)
        return found

    def knows_user(self, user: str) -> bool:
        """For the log alone: people type passwords into the wrong field, and those are not to be written down."""
        return any(user == known for known, _ in self._logins)

    def of_token(self) -> str:
        """The cookie's value for whoever has shown the token. It is the same after a restart."""
        return self._holder

    def of_login(self) -> str:
        """A new value for whoever has logged in; good until `forget`, the studio's end, or a month without use."""
        value = secrets.token_urlsafe(32)
        with self._lock:
            self._since[_key(value)] = self._clock()
            while len(self._since) > MOST_LOGINS:
                self._since.popitem(last=False)
        return value

    def forget(self, question: Asked) -> None:
        """Ends the login of this browser, and of no other."""
        with self._lock:
            for name, value in question.cookies:
                if name == self.cookie:
                    self._since.pop(_key(value), None)

    def _is_cookie(self, value: str) -> bool:
        if self._holder and hmac.compare_digest(_digest("", value), _digest("", self._holder)):
            return True
        key, now = _key(value), self._clock()
        with self._lock:
            since = self._since.get(key)
            if since is None or now - since > LOGIN_SECONDS:
                self._since.pop(key, None)
                return False
            self._since[key] = now
            self._since.move_to_end(key)
            return True


def _key(value: str) -> str:
    """Under which a cookie's value is known: looking up a digest tells nothing about how much of a guess was right."""
    return _digest("session", value).hex()


def _digest(*parts: str) -> bytes:
    """SHA-256 over the parts, each with its length, so that no two lists of parts share one."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "big") + data)
    return found.digest()
