"""What a node program and its clients say to each other: one JSON object a line, of these models and no others.

A request names what to `do`. It gets one answer with its `id`, whose `kind` is the same word, or `refused`. Every
length and pattern is bounded, so both sides may parse what they do not trust.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, WrapValidator

from titan_fleet.node.fields import (
    CHUNK_BYTES,
    FIRST,
    LAST,
    NAMELESS,
    Address,
    AnyRun,
    Base64,
    FilePath,
    Hash,
    HostName,
    Id,
    Label,
    Message,
    Moment,
    NewTokens,
    Prompt,
    RunName,
    Sha256,
    Size,
    State,
    Temperature,
    Text,
    Value,
    Variable,
)
from torchtitan.tools.runs import Progress, checked

PROTOCOL = 4
LINE_BYTES = 4 * 2**20  # a longer line is refused unread
CLUSTER = "cluster.toml"  # what a run that probes writes into its folder
MOST_ROWS = 5000  # files or runs in one answer
_ENVELOPE_BYTES = 1024  # of an answer, beside its rows
M = TypeVar("M", bound=Message)


class Git(Message):
    """Code from a repository: an address that the node allows, and the commit."""

    git: Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9][\x21-\x7e]*$")]
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]


Code = Hash | Git  # what is here: an archive that was put, or a commit that was fetched; or a commit to fetch


class WithId(Message):
    """A request, or its answer."""

    id: Id


class _Answered(BaseModel):
    id: Id


class Report(WithId):
    do: Literal["report"] = "report"


class Runs(WithId):
    """Asks for all rows. With the `mark` of an answer in `known`, it waits up to `seconds` for others than those."""

    do: Literal["runs"] = "runs"
    known: Label = ""
    seconds: Annotated[int, Field(ge=0, le=60)] = 0


class Port(WithId):
    """Asks for a port that is free at this moment, for the nodes to meet at."""

    do: Literal["port"] = "port"


class Put(WithId):
    """A piece of a code archive, in order from position 0. With the last one the node checks the hash and unpacks."""

    do: Literal["put"] = "put"
    name: Sha256
    position: Size
    data: Base64
    is_last: bool = False


class Has(WithId):
    do: Literal["has"] = "has"
    code: Code


class Start(WithId):
    """This node's part of a run. `rank` is the node's, `ranks_here` is NGPU (None: as run_llama_train.sh decides)."""

    do: Literal["start"] = "start"
    run: RunName
    config: Annotated[str, Field(max_length=2**18)]  # TOML
    code: Code
    nodes: Annotated[int, Field(ge=1, le=10000)] = 1
    rank: Annotated[int, Field(ge=0, le=9999)] = 0
    head: HostName | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    ranks_here: Annotated[int, Field(ge=1, le=1024)] | None = None
    environment: Annotated[dict[Variable, Value], Field(max_length=64)] = {}
    plan: Annotated[str, Field(max_length=2**16)] = ""  # JSON of `plan --out`: the run compares itself with it
    probes: Literal["auto", "bfloat16", "float32"] | None = None  # measures links in this dtype, and trains nothing
    again: bool = False  # goes on in the folder of a run of this name that is over, from its newest checkpoint


class Files(WithId):
    do: Literal["files"] = "files"
    run: AnyRun


class Piece(WithId):
    run: AnyRun
    path: FilePath
    position: Size = 0
    size: Annotated[int, Field(ge=1, le=CHUNK_BYTES)] = CHUNK_BYTES


class Read(Piece):
    do: Literal["read"] = "read"


class Follow(Piece):
    """Asks what a file has gained, as it grows. The file may not exist yet."""

    do: Literal["follow"] = "follow"


class Stop(WithId):
    """Asks the run to end as Ctrl-C does; what is still there after `seconds` is killed."""

    do: Literal["stop"] = "stop"
    run: RunName
    seconds: Annotated[int, Field(ge=0, le=3600)] = 60


class Delete(WithId):
    do: Literal["delete"] = "delete"
    run: RunName


class Generate(WithId):
    """Continues a text with a checkpoint, a folder step-N of the run, by the run's own code."""

    do: Literal["generate"] = "generate"
    run: AnyRun
    checkpoint: FilePath
    prompt: Prompt
    tokens: NewTokens
    temperature: Temperature


class Export(WithId):
    """Writes a checkpoint below the run, as safetensors in Hugging Face's form. One that is there already stays."""

    do: Literal["export"] = "export"
    run: RunName
    checkpoint: FilePath


class Device(Message):
    name: Label
    kind: Label  # "cuda"
    memory_bytes: Size
    used_bytes: Size
    utilisation: Annotated[float, Field(ge=0, le=1)] | None


class RunRow(Message, Progress):
    """A run, or this node's part of one. `log` is what its ranks here printed, a path for `follow`."""

    run: AnyRun
    folder: Text
    state: State
    is_own: bool  # False: below a watched folder; it can be read, and nothing else
    rank: Annotated[int, Field(ge=0, le=9999)] | None = None
    nodes: Annotated[int, Field(ge=1, le=10000)] | None = None
    head: Text | None = None  # host:port where the nodes meet: the same for all parts of a run
    started: Moment | None = None
    ended: Moment | None = None
    exit_code: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    code: Label | None = None
    log: FilePath | None = None


def row_of(said: Mapping[str, Any]) -> RunRow:
    """A row of what a disk or a node says: what is bad is left out, and `trouble` says why. Without a name, it is only
    shown.
    """
    found = checked(RunRow, said, {"run": NAMELESS, "folder": "", "state": "lost", "is_own": False})
    return found if found.run != NAMELESS else found.model_copy(update={"is_own": False})


def _row(said: Any, check: Callable[[Any], RunRow]) -> RunRow:
    """One bad row spoils no others of an answer."""
    return row_of(said) if isinstance(said, dict) else check(said)


def moment_of(seconds: float) -> float | None:
    return seconds if FIRST <= seconds <= LAST else None


class FileRow(Message):
    path: FilePath
    size: Size
    changed: Moment | None  # None: the disk gives no date


class ReportAnswer(WithId):
    kind: Literal["report"] = "report"
    node: Label  # host name
    version: Label
    protocol: Annotated[int, Field(ge=0, le=2**31)]
    platform: Label
    python: Label
    torch: Label | None
    devices: Annotated[list[Device], Field(max_length=256)]
    cores: Annotated[int, Field(ge=1, le=2**20)]
    load: Annotated[float, Field(ge=0, le=2**30)]  # of the last minute
    memory_bytes: Size
    used_bytes: Size | None
    free_bytes: Size  # on the disk of the runs
    addresses: Annotated[dict[Address, Label], Field(max_length=256)]  # with the interface of each
    git: Annotated[list[Text], Field(max_length=256)]  # what jobs may name
    home: Text


class RunsAnswer(WithId):
    kind: Literal["runs"] = "runs"
    runs: Annotated[list[Annotated[RunRow, WrapValidator(_row)]], Field(max_length=MOST_ROWS)]
    left_out: Size = 0
    mark: Label = ""  # changes with the rows


class PortAnswer(WithId):
    kind: Literal["port"] = "port"
    port: Annotated[int, Field(ge=1, le=65535)]


class CodeAnswer(WithId):
    """Whether the code is complete here."""

    kind: Literal["put", "has"]
    is_here: bool


class StartedAnswer(WithId):
    kind: Literal["start"] = "start"
    folder: Text
    log: FilePath


class FilesAnswer(WithId):
    kind: Literal["files"] = "files"
    files: Annotated[list[FileRow], Field(max_length=MOST_ROWS)]
    left_out: Size = 0


class DataAnswer(WithId):
    """`is_end`: of a read, nothing follows now; of a follow, nothing will, for the run is over."""

    kind: Literal["read", "follow"]
    data: Base64
    size: Size  # of the whole file
    is_end: bool


class StoppedAnswer(WithId):
    """No process of the run is left here; `state` is how it ended."""

    kind: Literal["stop"] = "stop"
    state: State


class DeletedAnswer(WithId):
    kind: Literal["delete"] = "delete"
    freed_bytes: Size


class MadeAnswer(WithId):
    """The text that was generated, cut where it is too long; or the folder of an export, below the run."""

    kind: Literal["generate", "export"]
    made: Annotated[str, Field(max_length=2**16)]


class Refused(Message):
    id: Id | None  # None: the line was no message
    kind: Literal["refused"] = "refused"
    why: Text


Request = Report | Runs | Port | Put | Has | Start | Files | Read | Follow | Stop | Delete | Generate | Export
AnyAnswer = (
    ReportAnswer
    | RunsAnswer
    | PortAnswer
    | CodeAnswer
    | StartedAnswer
    | FilesAnswer
    | DataAnswer
    | StoppedAnswer
    | DeletedAnswer
    | MadeAnswer
    | Refused
)
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="do")])
_ANSWER: TypeAdapter[AnyAnswer] = TypeAdapter(Annotated[AnyAnswer, Field(discriminator="kind")])


def read_request(line: bytes) -> Request:
    return _REQUEST.validate_json(line)


def read_answer(line: bytes) -> AnyAnswer:
    """What a node answers. If it cannot be taken, it counts as refused, so that who asked need not wait."""
    try:
        return _ANSWER.validate_json(line)
    except ValidationError as error:
        return Refused(id=_Answered.model_validate_json(line).id, why=f"its answer is none: {why(error)}")


def write(message: Message) -> bytes:
    return message.model_dump_json().encode() + b"\n"


def fitting(rows: Sequence[M]) -> list[M]:
    """The first of these rows, as many as one answer and its line may hold."""
    ends = itertools.accumulate(len(write(row)) for row in rows[:MOST_ROWS])
    return [row for row, end in zip(rows[:MOST_ROWS], ends, strict=True) if end < LINE_BYTES - _ENVELOPE_BYTES]


def why(error: ValidationError) -> str:
    """The first mistake of a line, without what the line held."""
    first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"[:500]
