"""Writes one record for each logged step to the console, metrics.jsonl, TensorBoard and Weights & Biases."""

import contextlib
import errno
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torchtitan.config.load import to_toml
from torchtitan.config.schema import Config
from torchtitan.observe.log import logger, wants_color
from torchtitan.whole_file import write_whole


@dataclass(frozen=True)
class StepRecord:
    """The numbers of a logged step; averages are over the steps since the previous logged one."""

    step: int
    loss: float
    max_loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    tokens_per_second: float  # per device
    tflops: float  # per device
    mfu: float
    memory_gib: float
    step_seconds: float
    data_seconds: float
    forward_backward_seconds: float
    update_seconds: float
    eta_seconds: float
    skipped_updates: int
    more: dict[str, Any] = field(default_factory=dict)  # of some models: numbers, and lists for the file alone


# Names of the curves. TensorBoard groups them by prefix, in alphabetical order.
_CURVES = {
    "loss": "loss/train",
    "max_loss": "loss/train_largest_of_a_rank",
    "validation_loss": "loss/validation",
    "memory_gib": "memory/gib",
    "grad_norm": "optimizer/gradient_norm",
    "lr": "optimizer/learning_rate",
    "skipped_updates": "optimizer/skipped_updates",
    "tokens_per_second": "speed/tokens_per_second_per_device",
    "tflops": "speed/tflops_per_device",
    "mfu": "speed/mfu",
    "step_seconds": "time/step_seconds",
    "data_seconds": "time/data_seconds",
    "forward_backward_seconds": "time/forward_backward_seconds",
    "update_seconds": "time/update_seconds",
}


class Clock:
    """Measures the time of training steps; it stands still inside `outside_training`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @contextmanager
    def outside_training(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._start += time.perf_counter() - begin

    def read(self) -> float:
        """Seconds since the last reading."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds


class Sink(Protocol):
    """A destination for numbers."""

    def write(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """A file with one JSON object on each line; floats read back exactly."""

    def __init__(self, path: Path, start_step: int) -> None:
        self.last_step = 0.0
        if start_step and path.exists():  # drop the steps after the checkpoint: the run will write them again
            kept = [line for line in path.read_text(errors="replace").splitlines() if _step_of(line) <= start_step]
            self.last_step = _step_of(kept[-1]) if kept else 0.0
            write_whole(path, "".join(line + "\n" for line in kept))
        self._file = path.open("ab" if start_step else "wb", buffering=0)  # a killed run keeps its last line

    def write(self, step: int, values: dict[str, Any]) -> None:
        # JSON has no NaN: a number that is not finite becomes null.
        finite = {n: value if isinstance(value, list) or math.isfinite(value) else None for n, value in values.items()}
        line = json.dumps({"step": step, **finite}, allow_nan=False).encode() + b"\n"
        begin = self._file.seek(0, os.SEEK_END)
        if self._file.write(line) != len(line):  # a disk that fills up writes only a part
            self._file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.last_step = step

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):  # a crash cut the line short
        return math.inf


class TensorBoard:
    """Writes event files; after a resume, steps that were written twice show once."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = functools.partial(SummaryWriter, str(folder))
        self._writer = self._open(purge_step=start_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:  # the writer's thread ended with this error: only a new writer works again
            self._writer = self._open()
            raise

    def write_text(self, name: str, step: int, text: str) -> None:
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # as it is, not as Markdown
        with contextlib.suppress(OSError):
            self._writer.add_text(name, indented, step)

    def close(self) -> None:
        self._writer.close()


class MetricsWriter:
    """Writes each record to every destination. Only rank 0 has a writer."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        start_step: int,
        total_steps: int,
        tokens_at: Callable[[int], int],
        unit: str = "tokens",
    ) -> None:
        self._color = wants_color(config.metrics.disable_color_printing)
        self._folder, self._total_steps, self._tokens_at, self.live = run_folder, total_steps, tokens_at, None
        self._unit = unit
        self._records = JsonLines(run_folder / "metrics.jsonl", start_step)
        validations = run_folder / "validation.jsonl"  # shortened on resume even if this run does not validate
        has_validations = config.validation.enable or validations.exists()
        self._validations = JsonLines(validations, start_step) if has_validations else None
        self._curves: list[Sink] = []
        self._over_tokens: TensorBoard | None = None
        if config.metrics.enable_tensorboard:
            folder = run_folder / config.metrics.save_tb_folder
            curves = TensorBoard(folder, start_step)
            curves.write_text("configuration", start_step, to_toml(config))
            self._curves.append(curves)
            self._over_tokens = TensorBoard(folder / "over_tokens", tokens_at(start_step))  # its axis is not steps
        if config.metrics.enable_wandb:
            from torchtitan.observe.weights_and_biases import WeightsAndBiases

            self._curves.append(WeightsAndBiases(run_folder, config))
        if sys.stderr.isatty():
            from torchtitan.observe.live import Live

            self.live = Live(start_step, total_steps)

    def write(self, record: StepRecord) -> None:
        values = asdict(record)
        step, more = values.pop("step"), values.pop("more")
        self._write(self._records, step, values | more)
        self._draw(step, values, {f"experts/{n}": value for n, value in more.items() if not isinstance(value, list)})
        logger.info(self._line(record))
        if self.live is not None:
            self.live.recorded(step, record.loss, record.tokens_per_second, record.eta_seconds)

    def write_validation(self, step: int, loss: float, num_tokens: int, metrics: dict[str, Any]) -> None:
        """A metric of several numbers, such as a matrix, is a list, and goes into the file alone."""
        assert self._validations is not None
        self._write(self._validations, step, {"validation_loss": loss, "validation_tokens": num_tokens, **metrics})
        single = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        self._draw(step, {"validation_loss": loss}, {f"validation/{name}": value for name, value in single.items()})
        unit = "targets" if self._unit != "tokens" else "pairs" if "margin" in metrics else "tokens"
        more = "".join(f", {name} {value:.4f}" for name, value in single.items())
        logger.info(f"validation after step {step}: loss {loss:.4f}{more} over {num_tokens:,} {unit}")

    def write_sample(self, step: int, text: str) -> None:
        logger.info(f"sample after step {step}: {text!r}")
        for sink in self._curves:
            if isinstance(sink, TensorBoard):
                sink.write_text("sample", step, text)

    def has_validated(self, step: int) -> bool:
        return self._validations is not None and self._validations.last_step == step

    def _draw(self, step: int, values: dict[str, float], more: dict[str, float] | None = None) -> None:
        curves = {_CURVES[name]: value for name, value in values.items() if name in _CURVES} | (more or {})
        for sink in self._curves:
            self._write(sink, step, curves)
        if self._over_tokens is not None:
            losses = {f"over_tokens/{name}": values[name] for name in ("loss", "validation_loss") if name in values}
            self._write(self._over_tokens, self._tokens_at(step), losses)

    def _write(self, sink: Sink, step: int, values: dict[str, float]) -> None:
        """Write, or warn: a record that cannot be written, as on a full disk, must not end the training."""
        try:
            sink.write(step, values)
        except OSError as error:
            logger.warning(
                f"step {step}: {type(sink).__name__} could not write: {error.strerror or error}; training continues"
            )

    def close(self) -> None:
        for sink in filter(None, [self._records, self._validations, *self._curves, self._over_tokens]):
            try:
                sink.close()
            except OSError as error:  # as in _write
                logger.warning(f"{type(sink).__name__} could not write its last records: {error.strerror or error}")
        from torchtitan.observe.curve import draw

        try:
            draw(self._folder)
        except OSError as error:
            logger.warning(f"{self._folder}: a picture could not be written: {error.strerror or error}")
        if self.live is not None:
            self.live.close()

    def _line(self, r: StepRecord) -> str:
        width = len(str(self._total_steps))
        parts = [
            (f"step {r.step:>{width}}/{self._total_steps}", "31"),
            (f"loss {r.loss:7.4f}", "32"),
            (f"grad {r.grad_norm:6.3f}", "33"),
            (f"lr {r.lr:.1e}", "37"),
            (f"{r.tokens_per_second:,.0f} {'tok' if self._unit == 'tokens' else self._unit}/s", "34"),
            (f"MFU {r.mfu:.1%}", "35"),
            (f"{r.memory_gib:.2f} GiB", "34"),
        ]
        if "expert_load" in r.more:
            parts.append((f"load {r.more['expert_load']:.2f}", "37"))
        if r.skipped_updates:
            parts.append((f"{r.skipped_updates} updates left out", "31"))
        return "  ".join(f"\033[{code}m{text}\033[0m" if self._color else text for text, code in parts)
