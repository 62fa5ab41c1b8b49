"""What the console remembers beside run folders: tokens, sessions, designs, tags, the audit log.

SQLite, or any URL of SQLAlchemy's. It may be lost without losing a run.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    make_url,
    or_,
    select,
    update,
)
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from titan_fleet.console.answers import Design, DesignRow, SaveDesign, TagRun
from titan_fleet.console.text import inert
from torchtitan.refusal import Refusal

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
_TITLE = Column("name", String(80), primary_key=True)
_VERSION = Column("version", BigInteger, nullable=False)
_DESIGN = _texts(config=2**18, nodes=2**17, machines=80, who=80)
DESIGNS = Table("designs", _META, _TITLE, _VERSION, *_DESIGN, _moment("changed"))
_KEY = [Column(name, String(length), primary_key=True) for name, length in (("run", 100), ("tag", 40))]
TAGS = Table("tags", _META, *_KEY)
_MOST_AUDITED = 100_000  # rows; the oldest go
_PATIENCE = {"connect_timeout": 5, "tcp_user_timeout": 10_000}  # seconds and ms; a host may drop every packet


def open_database(home: Path, url: str | None = None) -> Engine:
    """The database of a console; SQLite's file is its owner's alone."""
    folder = home / "console"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if url is None:
        file = folder / "console.db"
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        url = f"sqlite:///{file}"
    try:
        is_libpq = make_url(url).get_driver_name() in ("psycopg", "psycopg2")
        engine = create_engine(url, pool_pre_ping=True, connect_args=_PATIENCE if is_libpq else {})
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _in_parallel)
        _META.create_all(engine)
    except (ImportError, SQLAlchemyError) as error:
        why = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        form = "postgresql+psycopg://USER:PASSWORD@HOST/NAME after python -m pip install 'psycopg[binary]'"
        raise Refusal(f"--database cannot be opened: {why}; for Postgres, use {form}") from None
    return engine


def no_database(error: Exception) -> str:
    return f"the console's database fails ({type(error).__name__}); look at its disk, or at what --database names"


def _in_parallel(connection: Any, _: object) -> None:
    """`console token` writes while the console reads."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA busy_timeout=5000")


class Audit:
    """Who did what, and how it ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def write(self, who: str, address: str, what: str, target: str, outcome: str = "done") -> None:
        texts = {"who": who[:80], "address": address[:64], "what": what, "target": target[:256]}
        texts["outcome"] = outcome[:256]
        row = {name: inert(text.encode("utf-8", errors="replace")) for name, text in texts.items()}
        with self._engine.begin() as connection:
            found = connection.execute(AUDIT.insert().values(time=time.time(), **row))
            key = found.inserted_primary_key
            if key and key[0] % 1000 == 0:
                connection.execute(delete(AUDIT).where(AUDIT.c.id <= key[0] - _MOST_AUDITED))

    def newest(self, number: int, search: str = "") -> Sequence[Any]:
        """The newest first; with `search`, those that hold this text, letters of either case."""
        shown = (AUDIT.c[name] for name in ("who", "address", "what", "target", "outcome"))
        found = or_(*(column.icontains(search.replace("\0", ""), autoescape=True) for column in shown))
        with self._engine.connect() as connection:
            return connection.execute(select(AUDIT).where(found).order_by(AUDIT.c.id.desc()).limit(number)).all()


class Kept:
    """What people keep: designs, and tags of runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tags: dict[str, list[str]] = {}

    def designs(self) -> list[DesignRow]:
        columns = [DESIGNS.c[name] for name in DesignRow.model_fields]
        with self._engine.connect() as connection:
            return [DesignRow(**_fields(row)) for row in connection.execute(select(*columns).order_by(DESIGNS.c.name))]

    def design(self, name: str) -> Design | None:
        return Design(**_fields(row)) if (row := self._row(name)) else None

    def save_design(self, who: str, wish: SaveDesign) -> DesignRow:
        """Replaces the version that the person has seen, and no other; version 0 is a new design."""
        now = time.time()
        version = wish.version + 1 if wish.version else int(now)  # above all those of a deleted one of this name
        new: dict[str, Any] = wish.model_dump() | {"who": who, "changed": now, "version": version}
        values = new | {"nodes": json.dumps(wish.nodes)}
        replace = update(DESIGNS).where(*_is(wish.name, wish.version)).values(**values)
        try:
            with self._engine.begin() as connection:
                if wish.version == 0:
                    connection.execute(DESIGNS.insert().values(**values))
                elif not connection.execute(replace).rowcount:
                    raise self._stale(wish.name)
        except IntegrityError:
            raise self._stale(wish.name) from None
        return DesignRow(**{name: new[name] for name in DesignRow.model_fields})

    def delete_design(self, name: str, version: int) -> None:
        with self._engine.begin() as connection:
            if not connection.execute(delete(DESIGNS).where(*_is(name, version))).rowcount:
                raise self._stale(name)

    def tags(self) -> Mapping[str, Sequence[str]]:
        """The tags of each run that has some; those read last, as long as the database does not answer."""
        found: dict[str, list[str]] = {}
        with suppress(SQLAlchemyError):
            with self._engine.connect() as connection:
                for row in connection.execute(select(TAGS).order_by(TAGS.c.tag)):
                    found.setdefault(row.run, []).append(row.tag)
            self._tags = found
        return self._tags

    def tag(self, runs: Sequence[str], wish: TagRun) -> None:
        for run in runs:
            for tag in wish.add:
                with suppress(IntegrityError), self._engine.begin() as connection:  # it has the tag already
                    connection.execute(TAGS.insert().values(run=run, tag=tag))
        self._untag(TAGS.c.run.in_(runs) & TAGS.c.tag.in_(wish.remove))

    def forget(self, runs: Sequence[str]) -> None:
        """A later run of the same folder has no tags."""
        self._untag(TAGS.c.run.in_(runs))

    def _untag(self, which: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(TAGS).where(which))

    def _row(self, name: str) -> Any:
        with self._engine.connect() as connection:
            return connection.execute(select(DESIGNS).where(DESIGNS.c.name == name)).first()

    def _stale(self, name: str) -> Refusal:
        what = f"was saved by {row.who} since you opened it" if (row := self._row(name)) else "is not there any more"
        return Refusal(f"design = {name} {what}; save yours under another name, or open what is there")


def _is(name: str, version: int) -> tuple[Any, Any]:
    return DESIGNS.c.name == name, DESIGNS.c.version == version


def _fields(row: Any) -> dict[str, Any]:
    return {**row._mapping, "nodes": json.loads(row.nodes)}
