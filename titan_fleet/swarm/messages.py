"""What a site may say to a syncer: one strict model a route, in which every number, text and list has a bound.

The last model is the syncer's own file. It is checked when it is written as when it is read, and its bounds hold all
that a site may say, so a syncer can always start again from what it has written.
"""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from torchtitan.refusal import Refusal

MOST_RANKS = 4096  # of a site
MOST_WEIGHTS = 1 << 16  # of a model


def _below(place: tuple[int, int]) -> tuple[int, int]:
    if place[0] >= place[1]:
        raise ValueError("a syncer's place is below their number")
    return place


Count = Annotated[int, Field(ge=0, le=2**53)]
Tokens = Annotated[int, Field(ge=0, le=2**40)]  # of one difference
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Speed = Annotated[float, Field(ge=0, le=1e18)]
Streams = Annotated[int, Field(ge=1, le=2**31)]
Name = Annotated[str, Field(max_length=64)]
Run = Annotated[str, Field(pattern="^[0-9a-f]{0,16}$")]
Place = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1, le=1024)]], AfterValidator(_below)]
Value = Annotated[int, Field(ge=-(2**63), lt=2**63)] | float | bool | Annotated[str, Field(max_length=1024)] | None
Shared = Annotated[dict[Name, Value], Field(max_length=128)]
Part = Annotated[str, Field(pattern="^[a-z ]{1,32}$")]  # of a download
Download = Annotated[dict[Part, Annotated[str, Field(pattern="^[0-9a-z]{0,64}$")]], Field(max_length=8)]  # SHA-256
Size = Annotated[int, Field(ge=1, le=2**53)]
Shape = Annotated[list[Size], Field(max_length=8)]
Weights = Annotated[
    list[tuple[Annotated[str, Field(max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")], Shape]],
    Field(min_length=1, max_length=MOST_WEIGHTS),
]
Boxes = Annotated[list[tuple[Count, Count, Count, Count, Count]], Field(max_length=MOST_WEIGHTS)]


class Message(BaseModel):
    """What it does not name is not read. A number of another kind is refused, and so is one that is not finite."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


M = TypeVar("M", bound=Message)


class Hello(Message):
    site: Name
    shared: Shared
    streams: Streams
    place: Place
    swarm: Run


class Join(Message):
    run: Name
    weights: Weights
    download: Download = {}  # a module that reads no text has none
    step: Count
    is_new: bool


class Beat(Message):
    speed: Speed
    step: Count


class Leave(Message):
    pass


class Anchor(Message):
    boxes: Boxes


class Found(Anchor):
    rank: Rank


class Difference(Found):
    base: Count
    step: Count
    tokens: Tokens


class Result(Anchor):
    base: Count
    step: Count


class SiteRecord(Message):
    part: Count
    session: Count
    step: Count
    tokens: Annotated[int, Field(ge=0, lt=2**100)]  # of all its differences
    speed: Speed
    meeting: Name


class Known(Message):
    """A syncer's file: all that it knows beside the fragments."""

    run: Run
    seed: Count
    shared: Shared
    weights: Weights | None
    streams: Streams | None
    sites: dict[Name, SiteRecord]
    place: Place | None
    swarm: Run
    download: Download = {}  # as the first site has it
    versions: list[Annotated[int, Field(ge=-1)]] = []  # of the fragments' anchors that were given out


def read(kind: type[M], text: bytes | bytearray | str, what: str = "this is no message of a swarm") -> M:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refusal(f"{what}: {where[:80]}: {first['msg'][:200]}; {error.error_count()} such") from None
