"""The API: /api/..., described by /openapi.json. The gate has said who asks; `Actions` says what they may."""

from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.routing import Match

from titan_fleet.console import answers
from titan_fleet.console.actions import Actions
from titan_fleet.console.database import Audit, Kept, no_database
from titan_fleet.console.door.limits import Denied
from titan_fleet.console.door.people import Forbidden, Person
from titan_fleet.console.library import Library, Unknown
from titan_fleet.console.links import Links, read_links
from titan_fleet.console.nodes import Nodes
from titan_fleet.console.text import inert
from titan_fleet.console.verbs.submissions import sites
from titan_fleet.node.messages import CHUNK_BYTES, FilePath, RunName
from titan_fleet.ssh.client import Broken
from torchtitan.refusal import Refusal
from torchtitan.root import VERSION

_MOST_RECORDS = 5000
_MOST_MISTAKES, _MOST_CHARACTERS = 20, 200  # of a request, in the answer that refuses it

_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


class Refusing(answers.Answer):
    detail: str


def person_of(request: Request) -> Person:
    person: Person = request.state.person
    return person


Who = Annotated[Person, Depends(person_of)]
Id = Annotated[str, Path(max_length=100)]
Search = Annotated[answers.Plain, Query(max_length=200)]
Position = Annotated[int, Query(ge=-(2**40), le=2**53, description="bytes; a negative one counts from the end")]
Step = Annotated[int, Query(ge=-1, le=2**53)]
Tags = Annotated[list[answers.Tag], Query(max_length=answers.MOST_TAGS, default_factory=list)]
_CODES = (400, 401, 403, 404, 409, 413, 421, 429, 502, 503)
_MAY_REFUSE: dict[int | str, dict[str, object]] = {code: {"model": Refusing} for code in _CODES}


def build_app() -> FastAPI:
    app = FastAPI(title="torchtitan-recipe console", version=VERSION, docs_url=None, redoc_url=None)

    @app.exception_handler(OSError)
    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Exception) -> Response:
        kinds = {Unknown: 404, Forbidden: 403, Broken: 502}
        status = next((code for kind, code in kinds.items() if isinstance(error, kind)), 409)
        why = f"it cannot be read now: {error.strerror or 'it is gone'}" if isinstance(error, OSError) else str(error)
        return JSONResponse({"detail": why}, error.status if isinstance(error, Denied) else status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        """Without what was sent: Python's parser takes NaN and half a character, and no answer can hold them."""
        rows = [
            {
                "loc": [part if isinstance(part, int) else _shown(part) for part in mistake["loc"]],
                "msg": _shown(mistake["msg"]),
                "type": mistake["type"],
            }
            for mistake in error.errors()[:_MOST_MISTAKES]
        ]
        return JSONResponse({"detail": rows}, 422)

    @app.exception_handler(SQLAlchemyError)
    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": no_database(error)}, 503)

    return app


def _shown(text: str) -> str:
    return inert(text[:_MOST_CHARACTERS].encode("utf-8", errors="replace"))


def build_api(library: Library, nodes: Nodes, actions: Actions, audit: Audit, kept: Kept) -> APIRouter:
    api = APIRouter(prefix="/api", responses=_MAY_REFUSE)
    _add_reading(api, library, nodes)
    _add_files(api, library)
    _add_checkpoints(api, actions)
    _add_designs(api, actions, kept)
    _add_runs(api, actions)
    _add_actions(api, actions, audit)
    _add_links(api, nodes, actions)

    served = [route for route in api.routes if isinstance(route, APIRoute)]

    @api.api_route("/{rest:path}", methods=[], operation_id="nothing", include_in_schema=False)  # any method
    def nothing(rest: str, request: Request) -> Response:
        """What would else get a page of NiceGUI's."""
        here = [route for route in served if route.matches(request.scope)[0] is Match.PARTIAL]
        if methods := sorted({method for route in here for method in route.methods or ()}):
            raise HTTPException(405, f"use {' or '.join(methods)} here", {"Allow": ", ".join(methods)})
        raise Unknown(f"/api/{rest[:80]} is not served; /openapi.json lists what is")

    return api


def _add_reading(api: APIRouter, library: Library, nodes: Nodes) -> None:
    @api.get("/session")
    def session(who: Who) -> answers.Session:
        """Who asks, and the CSRF token that a browser's unsafe requests show."""
        return answers.Session(name=who.name, role=who.role, csrf=who.csrf)  # type: ignore[arg-type]

    @api.get("/nodes")
    def list_nodes() -> list[answers.NodePage]:
        """This machine and those of the file of nodes, as they reported last."""
        return nodes.pages()

    @api.get("/runs")
    def list_runs(tag: Tags) -> list[answers.Run]:
        """Every run, the newest first; with `tag`, once or several times, those that have all of these."""
        return library.runs(tag)

    @api.get("/runs/{id}")
    def one_run(id: Id) -> answers.RunPage:
        """A run with its configuration, and the names of its logs and checkpoints."""
        return library.page(id)

    @api.get("/runs/{id}/metrics")
    def metrics(id: Id, after: Step = -1, validated: Step | None = None) -> answers.Metrics:
        """Records of the steps after one, at most 5,000, and validations after `validated`, if that is given."""
        curves = library.curves(id)
        records = list(curves.training.after(after, _MOST_RECORDS))
        last = int(records[-1]["step"]) if records else after
        since = after if validated is None else validated
        validation = [one for one in curves.validation.after(since, _MOST_RECORDS) if one["step"] <= last]
        since = int(validation[-1]["step"]) if validation else since
        return answers.Metrics(records=records, validation=validation, next=last, validated=since)

    @api.get("/runs/{id}/prediction")
    def prediction(id: Id) -> answers.Prediction:
        """What the planner predicted for this run, beside what was measured."""
        if (found := library.prediction(id)) is None:
            raise Unknown("this run was started without a plan; /api/plan makes some")
        return found

    @api.get("/runs/{id}/hang")
    def hang(id: Id) -> answers.Hang:
        """The report of the last hang, and the names of the stacks, which `logs` gives."""
        if (found := library.hang(id)) is None:
            raise Unknown("no rank of this run has waited in vain; look at its logs")
        return found


def _add_files(api: APIRouter, library: Library) -> None:
    @api.get("/runs/{id}/files")
    def files(id: Id) -> answers.Files:
        rows, left_out = library.find(id).place.files()
        return answers.Files(files=list(rows), left_out=left_out)

    @api.get("/runs/{id}/files/{path:path}", response_class=StreamingResponse, responses=_BYTES)
    async def download(id: Id, path: FilePath) -> StreamingResponse:
        """The bytes of a file."""
        first, size = await run_in_threadpool(library.read, id, path, 0, CHUNK_BYTES)

        async def pieces() -> AsyncIterator[bytes]:
            piece, position = first, 0
            while piece and position < size:
                piece = piece[: size - position]  # a file that grows meanwhile is sent as it was
                yield piece
                position += len(piece)
                if position < size:
                    piece, _ = await run_in_threadpool(library.read, id, path, position, CHUNK_BYTES)

        name = quote(path.rpartition("/")[2] or "file")
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{name}", "content-length": str(size)}
        return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)

    @api.get("/runs/{id}/logs/{name:path}")
    def log(
        id: Id,
        name: FilePath,
        position: Position = 0,
        search: Search = "",
    ) -> answers.LogPiece:
        """At most 64 KiB of a log from a position on; with `search`, the lines that hold this text."""
        return library.log(id, name, position, search)


def _add_checkpoints(api: APIRouter, actions: Actions) -> None:
    @api.post("/runs/{id}/generate")
    def generate(who: Who, id: Id, wish: answers.GenerateText) -> answers.Made:
        """Continue a text with a checkpoint, on the CPU of the run's node. It may take minutes."""
        return actions.generate(who, id, wish)

    @api.post("/runs/{id}/export")
    def export(who: Who, id: Id, wish: answers.ExportCheckpoint) -> answers.Made:
        """Write a checkpoint for Hugging Face below the run, among its files. It may take minutes."""
        return actions.export(who, id, wish)


def _add_designs(api: APIRouter, actions: Actions, kept: Kept) -> None:
    @api.get("/designs")
    def list_designs() -> list[answers.DesignRow]:
        """The saved designs, by name."""
        return kept.designs()

    @api.get("/designs/{name}")
    def one_design(name: RunName) -> answers.Design:
        """A design with its configuration."""
        if (design := kept.design(name)) is None:
            raise Unknown(f"design = {name} is not known; /api/designs lists those that are")
        return design

    @api.post("/designs")
    def save_design(who: Who, wish: answers.SaveDesign) -> answers.DesignRow:
        """Save a design; refused if somebody saved it after the version that the wish names."""
        return actions.save_design(who, wish)

    @api.post("/designs/{name}/delete")
    def delete_design(who: Who, name: RunName, wish: answers.Seen) -> answers.Done:
        """Delete a design; refused in the same way."""
        actions.delete_design(who, name, wish.version)
        return answers.Done()


def _add_runs(api: APIRouter, actions: Actions) -> None:
    @api.post("/runs", status_code=201)
    def start(who: Who, wish: answers.StartRun) -> answers.Started:
        """Start a run; it goes on when the console ends."""
        return actions.start(who, wish)

    @api.get("/sites")
    def list_sites() -> list[str]:
        """The schedulers whose client is on the console's machine."""
        return sites()

    @api.post("/submissions")
    def submit(who: Who, wish: answers.SubmitRun) -> answers.Submission:
        """Submit a run to a scheduler; with `only_print`, show the script alone."""
        return actions.submit(who, wish)

    @api.post("/runs/{id}/tags")
    def tag(who: Who, id: Id, wish: answers.TagRun) -> answers.Run:
        """Add and remove tags of a run."""
        return actions.tag(who, id, wish)

    @api.post("/runs/{id}/resume", status_code=201)
    def resume(who: Who, id: Id) -> answers.Started:
        """Go on with a run that was stopped or failed, on the same nodes, from its newest checkpoint."""
        return actions.resume(who, id)

    @api.post("/runs/{id}/stop")
    def stop(who: Who, id: Id, wish: answers.Stop | None = None) -> answers.Done:
        """End a run as Ctrl-C does, then harder; answers when no process of it is left."""
        return actions.stop(who, id, (wish or answers.Stop()).seconds)

    @api.post("/runs/{id}/delete")
    def delete(who: Who, id: Id) -> answers.Done:
        """Delete the folder of a run that is over, for good."""
        return actions.delete(who, id)


def _add_actions(api: APIRouter, actions: Actions, audit: Audit) -> None:
    @api.post("/check")
    def check(who: Who, wish: answers.CheckText) -> answers.Checked:
        """The mistakes of a configuration."""
        return answers.Checked(mistakes=actions.check(who, wish))

    @api.post("/plan")
    def plan(who: Who, wish: answers.PlanText) -> list[answers.Proposal]:
        """The planner's best layouts for a configuration on these nodes, the fastest first. It takes seconds."""
        return actions.plan(who, wish)

    @api.post("/nodes/{name}/install")
    def install(who: Who, name: Id) -> answers.Done:
        """Copy the console's checkout to a bare host, and make its environment. For admins; it takes minutes."""
        actions.install(who, name)
        return answers.Done()

    @api.get("/audit")
    def newest(
        who: Who,
        number: Annotated[int, Query(ge=1, le=1000)] = 100,
        search: Search = "",
    ) -> list[answers.AuditRow]:
        """Who did what, the newest first; with `search`, the rows that hold this text. For admins."""
        who.need("admin")
        names = answers.AuditRow.model_fields
        return [
            answers.AuditRow(**{name: getattr(row, name) for name in names}) for row in audit.newest(number, search)
        ]


def _add_links(api: APIRouter, nodes: Nodes, actions: Actions) -> None:
    @api.get("/links")
    def links() -> Links | None:
        """What a probe of several nodes found last; null before the first."""
        return read_links(nodes.links)

    @api.post("/links")
    def measure(who: Who) -> Links | None:
        """Measure the links between all other machines that are connected; this takes a minute or more."""
        actions.measure(who)
        return read_links(nodes.links)
