"""What all sections of the schema share: how strict they are, how their texts are shown, and the number types."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("zero", "0 would do nothing; use 1 or more, or -1 (see --help)")
    return value


Finding = tuple[tuple[str, ...], str]  # keys that a conflict rests on, and the message
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(gt=0, le=10**8)]  # three years: torch accepts no unlimited timeout
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
AllOrCount = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]  # -1 means "as many as fit"


def _one_line(text: str | None) -> str | None:
    return " ".join(text.split()) if text else text


class Section(BaseModel):
    """A frozen TOML section. It refuses unknown keys and converts no value silently."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Put each help text on one line, before pydantic copies the texts into the JSON Schema."""
        cls.__doc__ = _one_line(cls.__doc__)
        for field in cls.model_fields.values():
            field.description = _one_line(field.description)
        return handler(source)


class OtherSection(Section):
    """A section that another package adds, for runs that meet somebody after a step. By default it asks for nothing."""

    def conflicts(self) -> Iterator[Finding]:
        """Values of the section that cannot be combined."""
        yield from ()

    @property
    def joins(self) -> str | None:
        """The name of the function that takes a run to those it meets; None: it trains alone."""
        return None

    @property
    def num_copies(self) -> int:
        """How many copies of the trained weights, in float32, a run holds for those it meets."""
        return 0
