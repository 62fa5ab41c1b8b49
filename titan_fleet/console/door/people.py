"""Who asks, and what they may: tokens with a role, sessions of browsers. Secrets are stored as hashes alone.

A token is ID.SECRET with 256 random bits, so a plain SHA-256 is enough: nobody can try that many.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError

from titan_fleet.console.database import SESSIONS, TOKENS
from torchtitan.refusal import Refusal

ROLES = ("viewer", "operator", "admin")  # each may also what those before it may
SESSION_SECONDS = 12 * 3600
_KNOWN_SECONDS = 2.0  # for so long a revoked token may still be taken
_MOST_KNOWN = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,79}")


class Forbidden(Refusal):
    """The role is too low."""


@dataclass(frozen=True)
class Person:
    name: str
    role: str
    token: str = ""  # its id; "" on loopback without tokens
    csrf: str = ""  # of a browser's session
    address: str = ""

    def may(self, role: str) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def need(self, role: str) -> None:
        if not self.may(role):
            raise Forbidden(f"{self.name} is {self.role}, and this needs {role}; ask an admin for another token")


class People:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, tuple[float, Person | None]] = {}  # by the hash of what was shown

    def add_token(self, name: str, role: str) -> str:
        """A new token, which is shown this once."""
        if not _NAME.fullmatch(name):
            raise Refusal(f"name = {name!r} has characters that a log cannot show; use letters, digits, . _ @ and -")
        id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        row = {"id": id, "name": name, "role": role, "hash": _hash(secret), "created": time.time()}
        try:
            with self._engine.begin() as connection:
                connection.execute(TOKENS.insert().values(**row))
        except IntegrityError:
            raise Refusal(f"name = {name} has a token already; revoke that, or choose another name") from None
        return f"{id}.{secret}"

    def revoke_token(self, name: str) -> None:
        """Its sessions end, too."""
        with self._engine.begin() as connection:
            id = connection.execute(select(TOKENS.c.id).where(TOKENS.c.name == name)).scalar()
            if id is None:
                raise Refusal(f"name = {name} has no token; `console token list` shows those that have")
            connection.execute(delete(SESSIONS).where(SESSIONS.c.token == id))
            connection.execute(delete(TOKENS).where(TOKENS.c.id == id))

    def require_admin(self) -> None:
        if not any(row.role == "admin" for row in self.tokens()):
            verb = "python -m torchtitan console token add NAME --role admin"
            raise Refusal(f"no admin has a token, so nobody could log in; make one by: {verb}")

    def tokens(self) -> Sequence[Any]:
        with self._engine.connect() as connection:
            return connection.execute(select(TOKENS).order_by(TOKENS.c.created)).all()

    def of_token(self, token: str) -> Person | None:
        return self._remember(f"token {token}", lambda: self._of_token(token))

    def of_session(self, session: str) -> Person | None:
        return self._remember(f"session {session}", lambda: self._of_session(SESSIONS.c.hash == _hash(session)))

    def is_still(self, person: Person) -> bool:
        """Whether the token is not revoked and has the role that it had, and a browser's session goes on."""
        if not person.token:
            return True
        if person.csrf:
            found = self._remember(f"csrf {person.csrf}", lambda: self._of_session(SESSIONS.c.csrf == person.csrf))
        else:
            found = self._remember(f"id {person.token}", lambda: self._of_id(person.token))
        return found is not None and found.role == person.role

    def start_session(self, person: Person) -> str:
        session, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        now = time.time()
        row = {"hash": _hash(session), "token": person.token, "csrf": csrf, "ends": now + SESSION_SECONDS}
        with self._engine.begin() as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.ends < now))
            connection.execute(SESSIONS.insert().values(**row))
        return session

    def end_session(self, session: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.hash == _hash(session)))
        self._known.pop(_hash(f"session {session}"), None)

    def _remember(self, shown: str, look: Any) -> Person | None:
        key, now = _hash(shown), time.monotonic()
        if (known := self._known.get(key)) and now - known[0] < _KNOWN_SECONDS:
            return known[1]
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        found: Person | None = look()
        self._known[key] = now, found
        return found

    def _row(self, id: str) -> Any:
        with self._engine.connect() as connection:
            return connection.execute(select(TOKENS).where(TOKENS.c.id == id)).first()

    def _of_id(self, id: str) -> Person | None:
        row = self._row(id)
        return Person(row.name, row.role, row.id) if row else None

    def _of_token(self, token: str) -> Person | None:
        id, _, secret = token.partition(".")
        row = self._row(id)
        expected = row.hash if row else _hash("")  # the same work where there is none
        is_right = hmac.compare_digest(_hash(secret), expected)
        return Person(row.name, row.role, row.id) if row and is_right else None

    def _of_session(self, which: Any) -> Person | None:
        with self._engine.connect() as connection:
            row = connection.execute(select(SESSIONS).where(which)).first()
        if row is None or row.ends < time.time():
            return None
        person = self._of_id(row.token)
        return Person(person.name, person.role, person.token, row.csrf) if person else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
