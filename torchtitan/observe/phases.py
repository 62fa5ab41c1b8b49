"""Times the parts of a step on the device, without waiting for it."""

import time
from typing import Any

import torch


class Phases:
    """Call `mark` three times a step: before forward, after backward and after the update."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        """Seconds of forward and backward, and of updates, since the last reading. The device must be done by now."""
        totals = [0.0, 0.0]
        for i in range(0, len(self._marks), 3):
            marks = self._marks[i : i + 3]
            for phase, (begin, end) in enumerate(zip(marks, marks[1:], strict=False)):
                totals[phase] += begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin
        self._marks.clear()
        return totals[0], totals[1]
