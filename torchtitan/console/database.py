"""What the console remembers beside run folders: tokens, sessions, the audit log. SQLite, or any URL of SQLAlchemy's.

It may be lost without losing a run.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Float, Integer, MetaData, String, Table, create_engine, delete, event, select
from sqlalchemy.engine import Engine

_META = MetaData()
_ID = Column("id", String(16), primary_key=True)


def _texts(**lengths: int) -> list[Any]:
    return [Column(name, String(length), nullable=False) for name, length in lengths.items()]


def _moment(name: str) -> Any:
    return Column(name, Float, nullable=False)


_NAME = Column("name", String(80), unique=True, nullable=False)
TOKENS = Table("tokens", _META, _ID, _NAME, *_texts(role=16, hash=64), _moment("created"))
_SESSION = Column("hash", String(64), primary_key=True)
SESSIONS = Table("sessions", _META, _SESSION, *_texts(token=16, csrf=64), _moment("ends"))
_NUMBER = Column("id", Integer, primary_key=True)
_DONE = _texts(who=80, address=64, what=32, target=256, outcome=256)
AUDIT = Table("audit", _META, _NUMBER, _moment("time"), *_DONE)
_MOST_AUDITED = 100_000  # rows; the oldest go


def open_database(home: Path, url: str | None = None) -> Engine:
    """The database of a console; the file is its owner's alone."""
    if url is None:
        folder = home / "console"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / "console.db"
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        url = f"sqlite:///{file}"
    engine = create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _in_parallel)
    _META.create_all(engine)
    return engine


def _in_parallel(connection: Any, _: object) -> None:
    """`console token` writes while the console reads."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA busy_timeout=5000")


class Audit:
    """Who did what, and how it ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def write(self, who: str, address: str, what: str, target: str, outcome: str = "done") -> None:
        row = {"who": who[:80], "address": address[:64], "what": what, "target": target[:256], "outcome": outcome[:256]}
        with self._engine.begin() as connection:
            found = connection.execute(AUDIT.insert().values(time=time.time(), **row))
            key = found.inserted_primary_key
            if key and key[0] % 1000 == 0:
                connection.execute(delete(AUDIT).where(AUDIT.c.id <= key[0] - _MOST_AUDITED))

    def newest(self, number: int) -> Sequence[Any]:
        with self._engine.connect() as connection:
            return connection.execute(select(AUDIT).order_by(AUDIT.c.id.desc()).limit(number)).all()
