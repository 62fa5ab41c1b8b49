"""The page on which a browser shows a token once, and gets a cookie. Plain HTML: nothing of it is code."""

from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from titan_fleet.console.database import Audit
from titan_fleet.console.door.gate import Rules
from titan_fleet.console.door.limits import Limits, address_of
from titan_fleet.console.door.people import SESSION_SECONDS, People

_COOKIE: dict[str, Any] = {"path": "/", "httponly": True, "samesite": "strict"}
_FORM = (Path(__file__).parent / "login.html").read_text(encoding="utf-8")


def build_login(rules: Rules, people: People, audit: Audit, limits: Limits) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/login")
    def form() -> Response:
        return _page("")

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        address = address_of(request.scope)
        try:
            fields = parse_qs((await request.body()).decode("utf-8", errors="replace"), max_num_fields=4)
        except ValueError:
            return _page("This form has one field, the token.", 400)
        person = people.of_token(fields.get("token", [""])[0].strip())
        if person is None:
            limits.attempts.take(address)
            audit.write("unknown", address, "log in", "", "refused: the token is unknown or revoked")
            return _page("This token is unknown or revoked.", 401)
        audit.write(person.name, address, "log in", person.role)
        answer = RedirectResponse("/", 303)
        session = people.start_session(person)
        answer.set_cookie(rules.cookie, session, SESSION_SECONDS, secure=rules.is_tls, **_COOKIE)
        return answer

    @router.post("/logout")
    def log_out(request: Request) -> Response:
        if session := request.cookies.get(rules.cookie):
            people.end_session(session)
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(rules.cookie, secure=rules.is_tls, **_COOKIE)
        return answer

    return router


def _page(trouble: str, status: int = 200) -> Response:
    shown = f'<p role="alert">{escape(trouble)}</p>' if trouble else ""
    return HTMLResponse(_FORM.replace("TROUBLE", shown), status, headers={"cache-control": "no-store"})
