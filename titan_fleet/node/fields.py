"""What a field of a message may hold: every length, number and pattern has a bound."""

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from torchtitan.foreign import printable
from torchtitan.tools.runs import Label as Label

CHUNK_BYTES = 2**20  # of a file or an archive in one message
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"
_PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*$"


def _address(text: str) -> str:
    ipaddress.ip_address(text)  # raises ValueError where it is none
    return text


Id = Annotated[int, Field(ge=0, le=2**53)]
Size = Annotated[int, Field(ge=0, le=2**60)]
Text = Annotated[str, Field(max_length=4096), AfterValidator(printable)]
RunName = Annotated[str, Field(pattern=_NAME)]
# The third folder of --watch has number 2: its runs are @2/path/of/the/run, or @2 if the folder itself is one.
AnyRun = Annotated[str, Field(pattern=_NAME + r"|^@[0-9]{1,3}(/[^\x00-\x1f\x7f-\x9f]{1,512})?$")]
FilePath = Annotated[str, Field(min_length=1, max_length=1024, pattern=_PLAIN)]
Address = Annotated[str, Field(max_length=80), AfterValidator(_address)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Hash = Annotated[str, Field(pattern="^([0-9a-f]{64}|[0-9a-f]{40})$")]
Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]{0,79}$")]
Value = Annotated[str, Field(max_length=1024, pattern=_PLAIN)]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9:\[][A-Za-z0-9_.:%\]-]{0,252}$")]
_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
Base64 = Annotated[str, Field(max_length=CHUNK_BYTES * 4 // 3 + 4, pattern=_BASE64)]
Prompt = Annotated[str, Field(max_length=8192, pattern=r"^[^\x00]+$")]
NewTokens = Annotated[int, Field(ge=1, le=1000)]
Temperature = Annotated[float, Field(ge=0, le=100)]
State = Literal["running", "ended", "stopped", "failed", "lost"]
FIRST, LAST = -62_135_596_800, 253_402_300_799  # the years 1 to 9999, of which every calendar has the date
Moment = Annotated[float, Field(ge=FIRST, le=LAST)]  # seconds since 1970
NAMELESS = "@999"  # a row of which even the name is bad


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)
