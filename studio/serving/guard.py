"""Stands before the whole page: every request is looked at here first, whatever route it names.

Pure ASGI, so that streams of events pass as they come. In this order: the name under which the studio is asked (403), the page
that asks (403), the key (401); then the request goes on without its secrets, and its answer gets the headers that keep it here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import quote, urlencode

from studio.serving import content_security_policy, file_answers, login_page
from studio.serving.allowed_hosts import Hosts, from_elsewhere
from studio.serving.credentials import COOKIE_SECONDS, Keys
from studio.serving.login_throttle import Throttle
from studio.serving.request_origin import Asked, asked, plain_scope, query_of
from studio.serving.responses import answer, with_headers

LOGIN, LOGOUT = "/login", "/logout"
MOST_FORM_BYTES = 16 * 1024
SLOWEST_ANSWER_SECONDS = 1.5
NO_REFERRER = (b"referrer-policy", b"no-referrer")
# Forms send no usable Origin under "no-referrer"; no other origin learns anything under this either.
SAME_ORIGIN_REFERRER = (b"referrer-policy", b"same-origin")
log = logging.getLogger("loft.access")


class Guard:
    """ASGI middleware. `root_path` is the path under which a proxy serves the page."""

    def __init__(self, app, *, keys: Keys, hosts: Hosts, root_path: str = "", throttle: Throttle | None = None):
        self.app, self.keys, self.hosts = app, keys, hosts
        self.root = "/" + root_path.strip("/") if root_path.strip("/") else ""
        self.throttle = throttle or Throttle()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # nothing here speaks WebSocket
            return await send({"type": "websocket.close", "code": 1008})
        question = asked(scope, proxies=self.hosts.proxies, root_path=self.root)
        if not self.hosts.is_known(question):
            return await self._unknown_host(question, send)
        if from_elsewhere(question):
            return await self._from_elsewhere(question, send)
        if question.path.rstrip("/") == LOGIN:
            return await self._login(question, receive, send)
        if question.path.rstrip("/") == LOGOUT:
            return await self._logout(question, send)
        tokens = question.values("token") if question.method in ("GET", "HEAD") else []
        if self.keys.lets_in(question):
            if tokens and question.path == "/":  # it has done its work, or is an old one
                return await self._go(send, question, self._address(question))
            return await self.app(plain_scope(scope, question), receive, self._with_headers(question, send))
        if tokens:
            return await self._by_address(question, tokens[0], send)
        if question.bearer:
            await self._judge(question, send, right=False, what="token")
            return None
        await self._ask(question, send)

    # Who may not in

    async def _unknown_host(self, question: Asked, send) -> None:
        name = question.host or "no host"
        words = f"This studio is not known as {name}. If that is a name of this machine, start Loft with --allow-host {name}."
        if question.host is None:
            words = "The request names no host."
        await self._refuse(question, send, "Not under this name", words)

    async def _from_elsewhere(self, question: Asked, send) -> None:
        words = (
            "Another site's page asked, and only Loft's own page may. Behind a proxy, start Loft with --trusted-proxy ADDRESS, "
            "so that it knows under which address the page is served."
        )
        await self._refuse(question, send, "Not from this page", words)

    async def _refuse(self, question: Asked, send, title: str, words: str) -> None:
        headers = [NO_REFERRER, (b"content-security-policy", login_page.POLICY.encode())]
        await answer(send, question.method, 403, login_page.refusal(title, words), headers=headers)

    async def _ask(self, question: Asked, send, *, wrong: str = "", status: int = 401, wait: float = 0) -> None:
        asking = login_page.asking_for_login if self.keys.asks_for_login else login_page.asking_for_token
        headers = [
            SAME_ORIGIN_REFERRER,
            (b"content-security-policy", login_page.POLICY.encode()),
            (b"www-authenticate", b'Bearer realm="Loft"'),
        ]
        if wait:
            headers.append((b"retry-after", str(int(wait) + 1).encode()))
        if question.site in ("cross-site", "same-site"):
            # A link on another site was followed, and the browser kept the cookie back. Asked by this page, it brings it.
            headers.append((b"refresh", f"0; url={self._address(question)}".encode("latin-1", "replace")))
        await answer(send, question.method, status, asking(f"{self.root}{LOGIN}", wrong), headers=headers)

    # Keys that are shown

    async def _by_address(self, question: Asked, token: str, send) -> None:
        right = self.keys.is_token(token) or (question.method == "GET" and self.keys.takes_ticket(token))
        if await self._judge(question, send, right=right, what="token"):
            await self._go(send, question, self._address(question), self.keys.of_token())

    async def _login(self, question: Asked, receive, send) -> None:
        if question.method != "POST":
            known = self.keys.lets_in(question)
            return await (self._go(send, question, f"{self.root}/") if known else self._ask(question, send))
        data = await _body(receive)
        if data is None:
            return await answer(
                send, question.method, 413, "Too much was sent.", kind="text/plain", headers=[NO_REFERRER]
            )
        form = dict(query_of(data.decode("latin-1")))
        if form.get("token"):
            value = login_page.token_in(form["token"])
            right, cookie, what = self.keys.is_token(value), self.keys.of_token, "token"
        else:
            user, password = form.get("username", ""), form.get("password", "")
            right, cookie = self.keys.is_login(user, password) or self.keys.open_to_all, self.keys.of_login
            what = f"password for {user!r}" if self.keys.knows_user(user) else "name"
        if await self._judge(question, send, right=right, what=what):
            await self._go(send, question, f"{self.root}/", cookie(), body=json.dumps({"success": True}))

    async def _judge(self, question: Asked, send, *, right: bool, what: str) -> bool:
        """Whether a key that was shown is taken. Answers where it is not: late, and not at all looked at after many wrong ones.

        The right token is always taken: nobody can guess it, so nobody who guesses keeps its owner out.
        """
        if right and what == "token":
            return True
        wait = self.throttle.wait(question.address)
        if wait:
            words = f"Too many wrong tries. Try again in {_seconds(wait)}."
            await self._ask(question, send, wrong=words, status=429, wait=wait)
            return False
        if right:
            self.throttle.succeeded(question.address)
            log.info("Somebody at %s logged in (%s).", question.address, what.removeprefix("password for "))
            return True
        wrong = self.throttle.wrong(question.address)
        log.warning("A wrong %s came from %s (%d in a row).", what, question.address, wrong)
        await asyncio.sleep(min(0.1 * 2 ** min(wrong - 1, 10), SLOWEST_ANSWER_SECONDS))
        await self._ask(
            question, send, wrong="That is not the token." if what == "token" else "Name or password is wrong."
        )
        return False

    async def _logout(self, question: Asked, send) -> None:
        """By a form or a script of this page alone: a link or a picture of another site cannot do it."""
        headers = [NO_REFERRER, (b"allow", b"POST")]
        if not self.keys.lets_in(question):
            return await self._ask(question, send)
        if question.method != "POST":
            return await answer(send, question.method, 405, "Send a POST.", kind="text/plain", headers=headers)
        self.keys.forget(question)
        await self._go(send, question, f"{self.root}/", "")

    async def _go(self, send, question: Asked, where: str, cookie: str | None = None, *, body: str = "") -> None:
        """Sends the browser on, with a cookie: a new one, or "" to take the old one away."""
        headers = [NO_REFERRER, (b"location", where.encode("latin-1", "replace"))]
        if cookie is not None:
            age = COOKIE_SECONDS if cookie else 0
            secure = "; Secure" if question.scheme == "https" else ""
            words = f"{self.keys.cookie}={cookie}; Path={self.root or '/'}; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"
            headers.append((b"set-cookie", words.encode()))
        # A program that sent a login wants to hear that it was right, not to be led to a page.
        status = 200 if body and not question.wants_page else 303
        if status == 200:
            headers = [pair for pair in headers if pair[0] != b"location"]
        await answer(send, question.method, status, body, kind="application/json", headers=headers)

    def _address(self, question: Asked) -> str:
        """Where the request goes, without the token."""
        rest = [(name, value) for name, value in question.query if name != "token"]
        path = question.path if question.path.startswith("/") and not question.path.startswith("//") else "/"
        return f"{self.root}{_quoted(path)}" + (f"?{urlencode(rest)}" if rest else "")

    def _with_headers(self, question: Asked, send):
        if question.path == "/":
            return content_security_policy.of_page(send)
        policy = file_answers.POLICY if question.path.startswith(file_answers.ROUTE) else content_security_policy.OTHER

        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                found = list(message.get("headers", ()))
                names = {name.lower() for name, _ in found}
                added = [NO_REFERRER]
                if b"content-security-policy" not in names:
                    added.append((b"content-security-policy", policy.encode()))
                message = {**message, "headers": with_headers(found, added)}
            await send(message)

        return send_with_headers


def _quoted(path: str) -> str:
    return quote(path, safe="/=:@!$&'()*+,;~", errors="replace")


def _seconds(wait: float) -> str:
    whole = int(wait) + 1
    return f"{whole} s" if whole < 120 else f"{-(-whole // 60)} minutes"


async def _body(receive) -> bytes | None:
    """The request's body; None where it is larger than a form can be."""
    data = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return data
        data += message.get("body", b"")
        if len(data) > MOST_FORM_BYTES:
            return None
        if not message.get("more_body"):
            return data
