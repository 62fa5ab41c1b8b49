"""The syncer over HTTPS. Only sites with a certificate of the swarm's authority get as far as a request.

A message is checked before any of it is kept or answered, so that a wrong one is refused to who sent it.
"""

import asyncio
import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from titan_fleet.swarm.certificates import revoked
from titan_fleet.swarm.decide import older_copy
from titan_fleet.swarm.fragments import Box
from titan_fleet.swarm.messages import Anchor, Beat, Difference, Found, Hello, Join, Leave, Message, Result, read
from titan_fleet.swarm.syncer.door import Door, Seldom
from titan_fleet.swarm.syncer.state import FragmentState
from titan_fleet.swarm.syncer.syncer import Syncer
from titan_fleet.swarm.wire import LARGEST_HEADER, boxes_of, cut, framed
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

SILENT_SECONDS = 60.0  # a body that stands still for so long is given up
POLL_SECONDS = 20.0  # an answer to "is it merged?" waits at most so long
_SHORT_BYTES = 1 << 16  # of a message without weights
_BOX_BYTES = 128  # of a box in a header, at most

Handler = Callable[[Request], Awaitable[Response]]
M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Anchor)


class _Busy(Exception):
    """The site sends and receives as much as it may; it tries again."""


class _Streamed(StreamingResponse):
    """A box at a time, so that an answer takes little memory."""

    def __init__(self, header: dict[str, Any], boxes: Iterator[bytes], done: Callable[[], None]) -> None:
        super().__init__(itertools.chain([framed(header)], boxes))
        self.done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.done()


class Server:
    def __init__(self, syncer: Syncer, keys: Path) -> None:
        self.syncer, self.keys = syncer, keys
        self.locks: dict[int, asyncio.Lock] = {}
        self.merged: dict[int, asyncio.Event] = {}
        self.held: Counter[str] = Counter()  # bytes of each site's bodies and answers that are on their way
        self.revoked: dict[str, str] = {}  # serial number -> name
        self.logs = Seldom(1.0)

    def app(self) -> Starlette:
        whole = {"hello": self._hello, "join": self._join, "beat": self._beat, "leave": self._leave}
        routes = [Route(f"/{name}", self._guarded(handler), methods=["POST"]) for name, handler in whole.items()]
        routes.append(Route("/status", self._guarded(self._status), methods=["GET"]))
        parts = {"found": self._found, "anchor": self._anchor, "difference": self._difference, "result": self._result}
        for name, handler in parts.items():
            path = f"/{{run}}/{{session}}/{{number}}/{name}"
            routes.append(Route(path, self._guarded(handler), methods=["POST"]))
        return Starlette(routes=routes, lifespan=self._lifespan)

    def build(self, host: str, port: int) -> Door:
        return Door(self.app(), self.keys, host, port, self.syncer.section.sites)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        clock = asyncio.create_task(self._watch_grace())
        yield
        clock.cancel()

    async def _watch_grace(self) -> None:
        """Merges whose grace ends while nothing arrives."""
        while True:
            await asyncio.sleep(0.2)
            for number in range(len(self.syncer.fragments)):
                if self.syncer.fragments[number].arrived():
                    try:
                        await self._merge(number)
                    except Exception as error:  # a full disk, say: what came stays, and is tried again
                        logger.error(f"fragment {number} could not be merged: {type(error).__name__}: {error}")
                        await asyncio.sleep(2)

    async def _merge(self, number: int) -> None:
        async with self.locks.setdefault(number, asyncio.Lock()):
            meeting = await asyncio.to_thread(self.syncer.merge_if_due, number)
        if meeting is not None:
            self.merged.pop(number, asyncio.Event()).set()

    def _guarded(self, handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def guarded(request: Request) -> Response:
            site = request.state.site
            try:
                self.revoked = revoked(self.keys, self.revoked)
                if request.state.serial in self.revoked:
                    raise Refusal(f"the certificate of {site} is revoked")
                return await handler(request)
            except Refusal as refusal:
                if self.logs.may(site):
                    logger.warning(f"{site}: {handler.__name__.strip('_')} is refused: {refusal}")
                return JSONResponse({"refusal": str(refusal)}, 409, {"connection": "close"})
            except _Busy:
                return JSONResponse({}, 503, {"connection": "close"})
            except (ClientDisconnect, TimeoutError):
                return Response(status_code=408, headers={"connection": "close"})

        return guarded

    async def _body(self, request: Request, limit: int) -> bytearray:
        """At most so many bytes, of which each few seconds some must come."""
        site, said = request.state.site, int(request.headers.get("content-length", limit + 1))
        if said > limit:
            raise Refusal(f"a body of {said} bytes, where {limit} are the most")
        done = self._hold(site, said)
        body, stream, filled = bytearray(said), aiter_of(request), 0
        try:
            while True:
                with anyio.fail_after(SILENT_SECONDS):
                    chunk = await stream()
                if chunk is None:
                    return body
                body[filled : filled + len(chunk)] = chunk  # HTTP itself ends a body that is longer than it said
                filled += len(chunk)
                self.syncer.hear(site)  # who sends is there, however slowly
        finally:
            done()

    def _hold(self, site: str, count: int) -> Callable[[], None]:
        """Note so many bytes of memory for a site, until what this returns is called.

        A site has twice a model in float32, as it may have lost its connections while it sent all fragments.
        """
        if self.held[site] + count > 8 * sum(each.size for each in self.syncer.fragments) + (64 << 20):
            raise _Busy
        self.held[site] += count
        return lambda: self.held.subtract({site: count})

    def _streamed(self, site: str, header: dict[str, Any], whole: Sequence[Box], boxes: Iterator[bytes]) -> _Streamed:
        return _Streamed(header, boxes, self._hold(site, 4 * max((box.size for box in whole), default=0)))

    async def _read(self, request: Request, kind: type[M], limit: int = _SHORT_BYTES) -> M:
        return read(kind, await self._body(request, limit))

    # --- without numbers

    async def _hello(self, request: Request) -> Response:
        said = await self._read(request, Hello)
        if said.site != request.state.site:
            raise Refusal(f"swarm.site = {said.site!r}, but the certificate is that of {request.state.site}")
        return JSONResponse(self.syncer.hello(said.site, said.shared, said.streams, said.place, said.swarm))

    async def _join(self, request: Request) -> Response:
        said = await self._read(request, Join, LARGEST_HEADER)
        own = request.state.site, said.run, said.weights, said.download, said.step, said.is_new
        return JSONResponse(await asyncio.to_thread(self.syncer.join, *own))

    async def _beat(self, request: Request) -> Response:
        said = await self._read(request, Beat)
        self.syncer.hear(request.state.site, speed=said.speed, step=said.step)
        return JSONResponse({})

    async def _leave(self, request: Request) -> Response:
        await self._read(request, Leave)
        self.syncer.leave(request.state.site)
        return JSONResponse({})

    async def _status(self, _: Request) -> Response:
        return JSONResponse(self.syncer.status())

    # --- with the numbers of a fragment

    async def _opened(
        self, request: Request, kind: type[A]
    ) -> tuple[int, int, FragmentState, A, list[Box], memoryview]:
        """Session, fragment and message, once the server knows that all of it fits."""
        run, *texts = (request.path_params[name] for name in ("run", "session", "number"))
        if not all(re.fullmatch("[0-9]{1,15}", text) for text in texts):
            raise Refusal("this address names no session and fragment; it comes from another version")
        session, number = map(int, texts)
        self.syncer.check(run, request.state.site, session)
        fragment = self.syncer.fragment(number)
        header = 1024 + _BOX_BYTES * len(fragment.boxes)
        body = await self._body(request, header + (4 * fragment.size if issubclass(kind, Found) else 0))
        self.syncer.check(run, request.state.site, session)  # it may have joined again since
        text, payload = cut(body, header)
        said = read(kind, text)
        return session, number, fragment, said, boxes_of(said.boxes, fragment.boxes), payload

    async def _found(self, request: Request) -> Response:
        session, number, fragment, said, boxes, payload = await self._opened(request, Found)
        own = request.state.site, said.rank, boxes, payload, session
        async with self.locks.setdefault(number, asyncio.Lock()):
            return JSONResponse({"is_whole": await asyncio.to_thread(fragment.found, *own)})

    async def _anchor(self, request: Request) -> Response:
        _, number, fragment, _, boxes, _ = await self._opened(request, Anchor)
        async with self.locks.setdefault(number, asyncio.Lock()):
            if fragment.version < 0:
                return JSONResponse({}, 202)
            about = {"version": fragment.version}
            return self._streamed(request.state.site, about, boxes, fragment.anchor_of(boxes))

    async def _difference(self, request: Request) -> Response:
        session, number, fragment, said, boxes, payload = await self._opened(request, Difference)
        site = request.state.site
        if said.base > fragment.version:
            raise Refusal(older_copy(number, said.base, fragment.version))
        async with self.locks.setdefault(number, asyncio.Lock()):
            if fragment.meeting_of(site, said.step, said.base) is None:  # else it is a repeated one
                own = site, said.rank, said.base, said.step, max(1, said.tokens), boxes, payload, session
                await asyncio.to_thread(fragment.add, *own)
        await self._merge(number)
        return JSONResponse({})

    async def _result(self, request: Request) -> Response:
        """What was merged since the site's version, once its difference was; 202 before, 404 if it is not here."""
        _, number, fragment, said, boxes, _ = await self._opened(request, Result)
        site, base = request.state.site, said.base
        for has_waited in (False, True):
            merged = self.merged.setdefault(number, asyncio.Event())
            meeting = fragment.meeting_of(site, said.step, base)
            if meeting is not None:
                break
            waiting = fragment.arriving.get(site)
            if waiting is None or waiting.step != said.step:
                return JSONResponse({}, 404)
            if has_waited:
                return JSONResponse({}, 202)
            with anyio.move_on_after(POLL_SECONDS):
                await merged.wait()
        assert meeting is not None
        about = vars(meeting) | {"sites": len(self.syncer.sites)}
        if not fragment.has_updates(base, meeting.version):
            return Response(framed(about | {"updates": 0}))
        about |= {"updates": meeting.version - base}
        return self._streamed(site, about, boxes, fragment.updates_of(base, meeting.version, boxes))


def aiter_of(request: Request) -> Callable[[], Awaitable[bytes | None]]:
    stream = request.stream()

    async def following() -> bytes | None:
        try:
            return await stream.__anext__()
        except StopAsyncIteration:
            return None

    return following
