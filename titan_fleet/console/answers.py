"""What the API says and takes: typed, bounded, and shown in /openapi.json."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from titan_fleet.node.messages import (
    FileRow,
    Git,
    NewTokens,
    Prompt,
    ReportAnswer,
    RunName,
    RunRow,
    State,
    Temperature,
    Value,
)

Role = Literal["viewer", "operator", "admin"]
Toml = Annotated[str, Field(max_length=2**18)]
Plain = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # as a database can keep it
# Letters and digits of most scripts; as ranges, for `\w` means ASCII alone to many who read /openapi.json.
_LETTERS = r"A-Za-z0-9_\u00c0-\u05ff\u0620-\u17ff\u1e00-\u1fff\u2c00-\u2dff\u3005-\ud7ff"
Tag = Annotated[str, Field(pattern=rf"^[{_LETTERS}][{_LETTERS}.:-]{{0,39}}$")]
MOST_TAGS = 20  # of a run


def _whole(given: object) -> object:
    """JSON has no integers: 60.0 is one."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


WHOLE = BeforeValidator(_whole)  # after the bounds: before them, the schema would have none
Version = Annotated[int, Field(ge=0, lt=2**53), WHOLE]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(RunRow):
    """A run, or a node's part of one. If it is its node's own, it can be stopped and deleted."""

    id: str  # names the run in addresses; it stays the same as long as the folder does
    name: str
    node: str
    away_since: float | None = None  # the node has not answered since, and the rest is as of then
    tags: list[str] = []


class RunPage(Answer):
    run: Run
    configuration: dict[str, str]  # key -> value as TOML writes it
    logs: list[str]
    checkpoints: list[str]


class Metrics(Answer):
    """Records in the order of their steps. `next` is the `after` that goes on from here.

    A validation comes after the record of its step: send `validated` back too, and none is missed.
    """

    records: list[dict[str, float]]
    validation: list[dict[str, float]]
    next: int
    validated: int


class Files(Answer):
    files: list[FileRow]
    left_out: int


class Hang(Answer):
    """What the watch wrote when no rank made progress. `went_on`: steps were recorded since."""

    report: str  # which rank lags, and where each rank is
    written: float  # seconds since 1970
    went_on: bool
    stacks: list[str]  # one of each rank that answered, for `logs`


class Prediction(Answer):
    """What the planner said of a run, and what the run took: the median of its steps, the most memory of a rank."""

    layout: str
    rests_on: str
    seconds: float
    memory_gib: float
    measured_seconds: float | None
    measured_memory_gib: float | None
    differs: list[str]  # keys in which the run is not the one that was planned


class LogMatch(Answer):
    position: int
    line: str


class LogPiece(Answer):
    """Text without what a terminal would obey. `next` is the position that goes on from here."""

    position: int
    next: int
    size: int
    text: str
    matches: list[LogMatch] = []


class NodePage(Answer):
    """What a node reported last, if it ever did."""

    name: str
    is_here: bool
    is_connected: bool
    is_bare: bool  # it answers, and has no node program yet
    trouble: str
    last_seen: float | None
    differs: list[str]  # versions that are not the console's
    utilisation: list[float]  # the devices' mean (without any, load over cores), over the last hour
    report: ReportAnswer | None


class Wish(Answer):
    """What a request holds: nothing is taken for what it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StartRun(Wish):
    """A configuration as TOML text. Without `code`, it is the console's checkout; without `nodes`, here."""

    config: Toml
    name: RunName
    nodes: Annotated[list[str], Field(max_length=256)] = []
    code: Git | None = None
    plan: Annotated[str, Field(max_length=2**16)] = ""  # the `plan` of a proposal, kept beside the run


class TagRun(Wish):
    """Tags to add and to remove; one that is in both goes."""

    add: Annotated[list[Tag], Field(max_length=MOST_TAGS)] = []
    remove: Annotated[list[Tag], Field(max_length=MOST_TAGS)] = []


class Started(Answer):
    id: str
    name: str


class SubmitRun(Wish):
    """A run for a scheduler. With `only_print` nothing is submitted."""

    site: Literal["slurm", "k8s", "jobset"]
    config: Toml
    name: RunName
    nodes: Annotated[int, Field(ge=1, le=10000), WHOLE] = 1
    gpus: Annotated[int, Field(ge=0, le=1024), WHOLE] = 8
    image: Value = ""
    mounts: Annotated[list[Value], Field(max_length=16)] = []
    only_print: bool = False


class Submission(Answer):
    """The script, or what the scheduler said; and the folder in which the run will be."""

    text: str
    folder: str


class CheckText(Wish):
    config: Toml
    whole: bool = False  # also the model and what the machine lacks, by a process of its own


class PlanText(Wish):
    """`machines` is a file of clusters/, such as h100_1x8; `nodes` are those of which the run would use all devices."""

    config: Toml
    machines: Annotated[str, Field(max_length=80)]
    nodes: Annotated[list[str], Field(max_length=256)] = []


class Proposal(Answer):
    """A layout with its prediction. `drawing` is an SVG of its pipeline over time; empty without one."""

    layout: str
    seconds: float
    memory_gib: float
    rests_on: str
    config: str
    plan: str  # the whole prediction as JSON, for the start
    drawing: str


class ExportCheckpoint(Wish):
    """`checkpoint` is one of the run's, such as step-100."""

    checkpoint: Annotated[str, Field(pattern="^step-[0-9]{1,18}$")]


class GenerateText(ExportCheckpoint):
    prompt: Prompt
    tokens: Annotated[NewTokens, WHOLE] = 100  # at most so many are added
    temperature: Temperature = 0.8


class Made(Answer):
    """`text` is the prompt and what follows it; `folder` lies below the run's."""

    text: str = ""
    folder: str = ""


class DesignRow(Answer):
    """A saved design: a configuration, the nodes, and the file of clusters/ with which it was planned."""

    name: RunName
    nodes: list[str]
    machines: str
    version: int  # each save has a higher one
    who: str
    changed: float


class Design(DesignRow):
    config: str


class Seen(Wish):
    """`version` is the one that the person saw last: what others saved since is never overwritten."""

    version: Version


class SaveDesign(Wish):
    """A configuration with or without mistakes. `version` 0 saves a new design; else see `Seen`."""

    name: RunName
    config: Annotated[Plain, Field(max_length=2**18)]
    nodes: Annotated[list[Annotated[Plain, Field(max_length=256)]], Field(max_length=256)] = []
    machines: Annotated[Plain, Field(max_length=80)] = ""
    version: Version = 0


class Checked(Answer):
    mistakes: list[str]


class Stop(Wish):
    seconds: Annotated[int, Field(ge=0, le=3600), WHOLE] = 60


class Done(Answer):
    state: State | None = None
    freed_bytes: int | None = None


class Session(Answer):
    name: str
    role: Role
    csrf: str  # what X-CSRF-Token must hold where a cookie logs in


class AuditRow(Answer):
    time: float
    who: str
    address: str
    what: str
    target: str
    outcome: str
