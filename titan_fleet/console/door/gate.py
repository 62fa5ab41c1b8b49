"""The door: every request and every socket passes here before anything else sees it.

Host and Origin are checked even on loopback, since any page in the browser can call 127.0.0.1. A request gets a person,
or nothing. Answers get a content policy with a nonce for the page's own scripts.
"""

import ipaddress
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titan_fleet.console.database import Audit, no_database
from titan_fleet.console.door.limits import Denied, Limits, address_of, within_size
from titan_fleet.console.door.people import People, Person

SOCKET, STATIC = "/_nicegui_ws/socket.io/", "/_nicegui/"
_INSIDE_OTHERS = ("iframe", "frame", "embed", "object", "fencedframe")
_SAFE = {"GET", "HEAD", "OPTIONS"}
_FORMS = ("/login", "/logout")  # plain forms can send no header; their Origin is checked
_FOR_PROXIES = {b"x-forwarded-prefix", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded"}


@dataclass(frozen=True)
class Rules:
    """How the console is served."""

    hosts: frozenset[str]  # names by which it may be called
    is_tls: bool
    needs_login: bool

    @property
    def scheme(self) -> str:
        return "https" if self.is_tls else "http"

    @property
    def cookie(self) -> str:
        return "__Host-console" if self.is_tls else "console"


@dataclass
class Gate:
    app: ASGIApp
    rules: Rules
    people: People
    audit: Audit
    owner_of: Callable[[str], Person | None]  # of a page that a socket names
    limits: Limits = field(default_factory=Limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in _FOR_PROXIES]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            host = self._host(scope)
            self._origin(scope, headers, host)
            self.limits.take(scope, headers)
            person = self._person(scope, headers)
        except SQLAlchemyError as error:
            await _deny(scope, receive, send, Denied(503, no_database(error)))
            return
        except Denied as error:
            await _deny(scope, receive, send, error)
            return
        if person is not None:
            scope.setdefault("state", {})["person"] = person
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send, person)
        else:
            await self._request(scope, receive, send, host, headers)

    def _host(self, scope: Scope) -> str:
        """A name that an attacker's DNS points at this machine is not among ours."""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name = _host_name(given[0]) if len(given) == 1 else ""
        if name not in self.rules.hosts:
            raise Denied(421, f"host = {name[:80]!a} is no name of this console; open one that it printed at its start")
        return given[0]

    def _origin(self, scope: Scope, headers: dict[str, str], host: str) -> None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        own = f"{self.rules.scheme}://{host}"
        is_socket = scope["type"] == "websocket"
        if (origin is not None or is_socket) and (origin or "").lower() != own.lower():
            raise Denied(403, "origin is that of another page; use the console's own")
        follows_a_link = headers.get("sec-fetch-mode") == "navigate" and scope.get("method") == "GET"
        if site not in ("same-origin", "none") and not follows_a_link and not is_socket:
            raise Denied(403, "the request comes from another site's page; use the console's own")
        if headers.get("sec-fetch-dest") in _INSIDE_OTHERS:
            raise Denied(403, "the console is not shown inside another page; open it in a tab")

    def _person(self, scope: Scope, headers: dict[str, str]) -> Person | None:
        """Who asks; None only where no person is needed."""
        address = address_of(scope)
        kind, _, token = headers.get("authorization", "").partition(" ")
        person, has_cookie = None, False
        if kind.lower() == "bearer":
            if (person := self.people.of_token(token.strip())) is None:
                self.limits.attempts.take(address)  # of wrong ones alone, so that nobody can lock others out
                self.audit.write("unknown", address, "log in", "", "refused: the token is unknown or revoked")
                raise Denied(401, "the token is unknown or revoked; ask an admin for another")
        elif session := _cookie(headers.get("cookie", ""), self.rules.cookie):
            person, has_cookie = self.people.of_session(session), True
        if person is None and not self.rules.needs_login:
            return Person("local", "admin", address=address)
        if person is None:
            if scope["path"] == "/login":
                return None
            raise Denied(401, "no token is shown; log in at /login, or send Authorization: Bearer TOKEN")
        is_unsafe = scope["type"] == "http" and scope["method"] not in _SAFE
        if has_cookie and is_unsafe and scope["path"] not in _FORMS:
            given = headers.get("x-csrf-token", "")
            if not secrets.compare_digest(given.encode(), person.csrf.encode()):
                raise Denied(403, "X-CSRF-Token is missing or wrong; GET /api/session tells it")
        return Person(person.name, person.role, person.token, person.csrf, address)

    async def _request(self, scope: Scope, receive: Receive, send: Send, host: str, headers: dict[str, str]) -> None:
        if scope["path"].startswith("/_nicegui_ws"):
            await _deny(scope, receive, send, Denied(403, "only a WebSocket is served here; use one"))
            return
        if not scope["path"].startswith(STATIC):  # what is not static is rewritten below, so it must not be packed
            scope["headers"] = [one for one in scope["headers"] if one[0] != b"accept-encoding"]
        nonce = secrets.token_urlsafe(16)
        page = _Page(send, nonce, _headers(self.rules, host, nonce))
        try:
            await self.app(scope, within_size(receive, headers), page.send)
        except Denied as error:
            await _deny(scope, receive, send, error)

    async def _socket(self, scope: Scope, receive: Receive, send: Send, person: Person | None) -> None:
        """A socket serves one page, and the person to whom that page was sent."""
        asked = {name: values[0] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        client = asked.get("client_id", "")
        is_right = scope["path"] == SOCKET and client and asked.get("transport") == "websocket"
        if not (person and is_right and self._is_of(client, person) and self.limits.open_socket(person.address)):
            await send({"type": "websocket.close", "code": 1008})
            return

        gone, is_closed = {"type": "websocket.disconnect", "code": 1008}, False

        async def checked() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive":
                try:
                    self.limits.messages.take(person.address)
                except Denied:
                    return gone
                if not (self.people.is_still(person) and self._is_of(client, person) and _is_for(client, message)):
                    return gone
            return message

        async def sent(message: Message) -> None:
            nonlocal is_closed
            if message["type"] == "websocket.send" and not self.people.is_still(person):
                message = {"type": "websocket.close", "code": 1008}
            if not is_closed:
                is_closed = message["type"] == "websocket.close"
                await send(message)

        try:
            await self.app(scope, checked, sent)
        finally:
            self.limits.close_socket(person.address)

    def _is_of(self, client: str, person: Person) -> bool:
        """A page that nobody here was sent is of an earlier console: NiceGUI has it load again."""
        owner = self.owner_of(client)
        return owner is None or (owner.token, owner.name, owner.role) == (person.token, person.name, person.role)


class _Page:
    """Sends an answer on, with the security headers, and a page with the nonce in each of its script tags."""

    def __init__(self, send: Send, nonce: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._nonce, self._headers = send, nonce.encode(), headers
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in self._headers}
            message["headers"] = [*(one for one in message["headers"] if one[0].lower() not in names), *self._headers]
            if any(one == (b"x-nicegui-content", b"page") for one in message["headers"]):
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            # All text of others in it has `<` escaped: each `<script` is NiceGUI's or ours.
            body = self._body.replace(b"<script", b'<script nonce="' + self._nonce + b'"')
            lengths = [(b"content-length", str(len(body)).encode())]
            others = [one for one in self._start["headers"] if one[0].lower() != b"content-length"]
            await self._send({**self._start, "headers": others + lengths})
            message, self._start = {"type": "http.response.body", "body": body}, None
        await self._send(message)


def _headers(rules: Rules, host: str, nonce: str) -> list[tuple[bytes, bytes]]:
    """`unsafe-eval`: NiceGUI's server calls its page by code. Inline styles: Quasar's and Vue's."""
    own, socket = f"{rules.scheme}://{host}", f"{'wss' if rules.is_tls else 'ws'}://{host}"
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}' 'unsafe-eval' {own}{STATIC}; "
        f"style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; connect-src 'self' {socket}; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "same-origin",  # with less, the origin of a form is null
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), microphone=(), geolocation=(), usb=(), payment=()",
    }
    if rules.is_tls:
        headers["strict-transport-security"] = "max-age=31536000"
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _deny(scope: Scope, receive: Receive, send: Send, error: Denied) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    accepts = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    headers = {"x-content-type-options": "nosniff", "content-security-policy": "default-src 'none'"}
    headers |= {"cache-control": "no-store", "connection": "close"}
    answer: Response = JSONResponse({"detail": str(error)}, error.status, headers)
    if error.status == 401 and b"text/html" in accepts and scope.get("method") == "GET":
        answer = RedirectResponse("/login", 303, headers)
    await answer(scope, receive, send)


def _host_name(given: str) -> str:
    """`[::1]:8400` -> `::1`. The port is the browser's business: a tunnel has another one."""
    try:
        parts = urlsplit(f"//{given}")
        name = parts.hostname or ""
        if parts.username is not None or parts.path or parts.query or parts.fragment or parts.port == 0:  # or no number
            return ""
        return str(ipaddress.ip_address(name)) if ":" in name else name
    except ValueError:
        return ""


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def _is_for(client: str, message: Message) -> bool:
    """Whether an event names the page of its socket, and no other. `42` is socket.io's mark of an event.

    Of the other packets those pass that hold none: close, ping, pong; connect, disconnect, acknowledge.
    """
    text = message.get("text") or ""
    if message.get("bytes") or not text.startswith("42"):
        return text.startswith(("1", "2", "3", "40", "41", "43"))
    try:
        named = json.loads(text[text.index("[") :])[1]
        return isinstance(named, dict) and named.get("client_id", client) == client
    except (ValueError, IndexError, RecursionError):
        return False


def loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
