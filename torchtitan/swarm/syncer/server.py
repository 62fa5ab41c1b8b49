"""The syncer over HTTPS. Only sites with a certificate of the swarm's authority get as far as a request."""

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.swarm.certificates import REVOKED, context
from torchtitan.swarm.syncer.state import FragmentState
from torchtitan.swarm.syncer.syncer import Syncer
from torchtitan.swarm.wire import LARGEST_HEADER, boxes_of, framed, opened

SILENT_SECONDS = 60.0  # a body that stands still for so long is given up
POLL_SECONDS = 20.0  # an answer to "is it merged?" waits at most so long
LARGEST_TEXT = 1 << 24  # of a request without numbers

Handler = Callable[[Request], Awaitable[Response]]


class _Named(H11Protocol):
    """Tells the application whose certificate a connection has."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("ssl_object").getpeercert()
        names = [value for part in peer["subject"] for key, value in part if key == "commonName"]
        self.app_state = {**self.app_state, "site": names[0], "serial": peer["serialNumber"]}


class Server:
    def __init__(self, syncer: Syncer, keys: Path) -> None:
        self.syncer, self.keys = syncer, keys
        self.locks: dict[int, asyncio.Lock] = {}
        self.merged: dict[int, asyncio.Event] = {}

    def app(self) -> Starlette:
        whole = {"hello": self._hello, "join": self._join, "beat": self._beat, "leave": self._leave}
        routes = [Route(f"/{name}", self._guarded(handler), methods=["POST"]) for name, handler in whole.items()]
        routes.append(Route("/status", self._guarded(self._status), methods=["GET"]))
        parts = {"found": self._found, "anchor": self._anchor, "difference": self._difference, "result": self._result}
        for name, handler in parts.items():
            path = f"/{{run}}/{{session:int}}/{{number:int}}/{name}"
            routes.append(Route(path, self._guarded(handler), methods=["POST"]))
        return Starlette(routes=routes, lifespan=self._lifespan)

    def build(self, host: str, port: int) -> uvicorn.Server:
        config = uvicorn.Config(
            self.app(),
            host=host,
            port=port,
            loop="asyncio",  # what was measured; uvloop may be there for another program
            http=_Named,
            ws="none",
            log_level="warning",
            timeout_keep_alive=75,
            limit_concurrency=1024,
            ssl_context_factory=lambda *_: context(self.keys, is_server=True),
        )
        return uvicorn.Server(config)

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
            try:
                if f"{int(request.state.serial, 16):x}" in self._revoked():
                    raise Refusal(f"the certificate of {request.state.site} is revoked")
                return await handler(request)
            except Refusal as refusal:
                logger.warning(f"{request.state.site}: {request.url.path} is refused: {refusal}")
                return JSONResponse({"refusal": str(refusal)}, 409, {"connection": "close"})
            except (KeyError, TypeError, ValueError) as error:
                return JSONResponse({"refusal": f"not a message of a swarm ({type(error).__name__})"}, 409)
            except (ClientDisconnect, asyncio.TimeoutError):
                return Response(status_code=408, headers={"connection": "close"})

        return guarded

    def _revoked(self) -> dict[str, str]:
        file = self.keys / REVOKED
        return json.loads(file.read_text()) if file.exists() else {}

    async def _body(self, request: Request, limit: int) -> bytearray:
        """At most so many bytes, of which each few seconds some must come."""
        said = int(request.headers.get("content-length", limit + 1))
        if said > limit:
            raise Refusal(f"a body of {said} bytes, where {limit} are the most")
        body, stream, filled = bytearray(said), aiter_of(request), 0
        while True:
            chunk = await asyncio.wait_for(stream(), SILENT_SECONDS)
            if chunk is None:
                return body
            body[filled : filled + len(chunk)] = chunk  # HTTP itself ends a body that is longer than it said
            filled += len(chunk)
            self.syncer.hear(request.state.site)  # who sends is there, however slowly

    async def _json(self, request: Request) -> dict[str, Any]:
        said = json.loads(await self._body(request, LARGEST_TEXT))
        if not isinstance(said, dict):
            raise Refusal("not a message of a swarm")
        return said

    # --- without numbers

    async def _hello(self, request: Request) -> Response:
        said = await self._json(request)
        if said["site"] != request.state.site:
            raise Refusal(f"swarm.site = {said['site']!r}, but the certificate is that of {request.state.site}")
        place = int(said["place"][0]), int(said["place"][1])
        own = said["shared"], int(said["streams"]), place, str(said["swarm"])
        return JSONResponse(self.syncer.hello(request.state.site, *own))

    async def _join(self, request: Request) -> Response:
        said = await self._json(request)
        own = said["run"], said["weights"], int(said["step"]), bool(said["is_new"])
        return JSONResponse(await asyncio.to_thread(self.syncer.join, request.state.site, *own))

    async def _beat(self, request: Request) -> Response:
        said = await self._json(request)
        self.syncer.hear(request.state.site, speed=float(said["speed"]), step=int(said["step"]))
        return JSONResponse({})

    async def _leave(self, request: Request) -> Response:
        self.syncer.leave(request.state.site)
        return JSONResponse({})

    async def _status(self, _: Request) -> Response:
        return JSONResponse(self.syncer.status())

    # --- with the numbers of a fragment

    async def _opened(self, request: Request) -> tuple[int, FragmentState, dict[str, Any], memoryview]:
        self.syncer.check(request.path_params["run"], request.state.site, request.path_params["session"])
        number = request.path_params["number"]
        fragment = self.syncer.fragment(number)
        header, payload = opened(await self._body(request, 4 * fragment.size + LARGEST_HEADER))
        return number, fragment, header, payload

    async def _found(self, request: Request) -> Response:
        number, fragment, header, payload = await self._opened(request)
        boxes = boxes_of(header, fragment.boxes)
        own = request.state.site, header["version"], header["rank"], boxes, payload
        async with self.locks.setdefault(number, asyncio.Lock()):
            return JSONResponse({"is_whole": await asyncio.to_thread(fragment.found, *own)})

    async def _anchor(self, request: Request) -> Response:
        number, fragment, header, _ = await self._opened(request)
        boxes = boxes_of(header, fragment.boxes)
        async with self.locks.setdefault(number, asyncio.Lock()):
            if fragment.version < 0:
                return JSONResponse({}, 202)
            return _streamed({"version": fragment.version}, fragment.anchor_of(boxes))

    async def _difference(self, request: Request) -> Response:
        number, fragment, header, payload = await self._opened(request)
        boxes = boxes_of(header, fragment.boxes)
        site, base, step, tokens = request.state.site, int(header["base"]), int(header["step"]), int(header["tokens"])
        if base > fragment.version:
            return JSONResponse({}, 410)  # this syncer has lost merges, and the site has them
        async with self.locks.setdefault(number, asyncio.Lock()):
            if fragment.meeting_of(site, step, base) is None:  # else it is a repeated one
                fragment.add(site, int(header["rank"]), base, step, max(1, tokens), boxes, payload)
        await self._merge(number)
        return JSONResponse({})

    async def _result(self, request: Request) -> Response:
        """What was merged since the site's version, once its difference was; 202 before, 404 if it is not here."""
        number, fragment, header, _ = await self._opened(request)
        boxes, site = boxes_of(header, fragment.boxes), request.state.site
        base, step = int(header["base"]), int(header["step"])
        for has_waited in (False, True):
            merged = self.merged.setdefault(number, asyncio.Event())
            meeting = fragment.meeting_of(site, step, base)
            if meeting is not None:
                break
            waiting = fragment.arriving.get(site)
            if waiting is None or waiting.step != step:
                return JSONResponse({}, 404)
            if has_waited:
                return JSONResponse({}, 202)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(merged.wait(), POLL_SECONDS)
        assert meeting is not None
        about = vars(meeting) | {"sites": len(self.syncer.sites)}
        if not fragment.has_updates(base, meeting.version):
            return Response(framed(about | {"updates": 0}))
        return _streamed(about | {"updates": meeting.version - base}, fragment.updates_of(base, meeting.version, boxes))


def _streamed(header: dict[str, Any], boxes: Iterator[bytes]) -> StreamingResponse:
    """A box at a time, so that an answer takes little memory."""
    return StreamingResponse(itertools.chain([framed(header)], boxes))


def aiter_of(request: Request) -> Callable[[], Awaitable[bytes | None]]:
    stream = request.stream()

    async def following() -> bytes | None:
        try:
            return await stream.__anext__()
        except StopAsyncIteration:
            return None

    return following
