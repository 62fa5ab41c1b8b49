"""The loader of a rank between the first and the last pipeline stage, which needs no data and looks for none."""

from collections.abc import Callable
from typing import Any

import torch

from torchtitan.data.batch import Batch, Origin
from torchtitan.models.spec import IGNORED


def no_text(rows: int, seq_len: int) -> Batch:
    inputs = torch.zeros(rows, seq_len, dtype=torch.int64)
    return Batch(inputs, torch.full_like(inputs, IGNORED), None, Origin([], [], []))


class NoData:
    """Gives batches without values for as long as the ranks that read have data: they agree on the end."""

    def __init__(self, empty: Callable[[], Any], any_says_so: Callable[[bool], bool] | None = None) -> None:
        self._empty, self._any_says_so = empty, any_says_so

    def next(self) -> Any:
        if self._any_says_so is not None and not self._any_says_so(False):
            return None
        return self._empty()

    def end(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"streams": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
