"""Keys of a run's folder, of what is observed while it trains, of the collectives between its ranks, and its seed."""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from torchtitan.config.section import NonNegativeInt, PositiveInt, Seconds, Section


def _on_a_disk(folder: str) -> str:
    """The folder with its `~` expanded, once for everything that is written there."""
    expanded = os.path.expanduser(folder)
    if "://" in folder or "::" in folder or expanded.startswith("~"):
        raise ValueError("must be a folder on a disk, as runs/first; only checkpoint.folder may be a URL")
    return expanded


class Job(Section):
    """The run: the file that describes it and the folder that it writes to."""

    config_file: str | None = None
    """The TOML file that describes the run. Keys that the file leaves out keep their defaults, and options on the
    command line override the file."""

    dump_folder: Annotated[str, Field(min_length=1), AfterValidator(_on_a_disk)] = "./outputs"
    """The run folder, on a disk; `~` means the home folder. The run writes config.toml, metrics.jsonl, curves, traces
    and checkpoints into it. Give each run a folder of its own."""

    description: str = "default job"
    """One line about the run, which the log shows at the start."""

    plan: Annotated[str, Field(min_length=1)] | None = None
    """The JSON of `plan --out`, beside this file, with which the run compares itself at its end. Not in torchtitan."""

    print_config: bool = False
    """Prints the resolved configuration at the start. The run folder's config.toml holds the same."""


class Profiling(Section):
    """Traces of the torch profiler and snapshots of GPU memory."""

    enable_profiling: bool = False
    """Every rank writes a torch profiler trace (Chrome and Perfetto format) every `profile_freq` steps. Switch it on
    to see where a step spends its time."""

    save_traces_folder: str = "profile_traces"
    """Name of the folder for the traces, inside the run folder."""

    profile_freq: PositiveInt = 10
    """Number of steps from one trace or memory snapshot to the next. A trace covers the last `profiler_active` of
    these steps."""

    profiler_active: PositiveInt = 1
    """Number of steps that each trace records. More steps make larger files."""

    profiler_warmup: NonNegativeInt = 3
    """Number of steps before each trace in which the profiler already runs but records nothing, so that its own start
    does not distort the trace."""

    enable_memory_snapshot: bool = False
    """Every rank writes a snapshot of CUDA memory every `profile_freq` steps, and one when memory runs out. Switch it
    on to see what fills a GPU; on a CPU the key is refused."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Name of the folder for the memory snapshots, inside the run folder."""


class Metrics(Section):
    """What the run reports, how often and where. It always writes metrics.jsonl."""

    log_freq: PositiveInt = 10
    """Number of steps from one log line to the next; a line shows averages over them. The host waits for the device
    only to log, save or validate, so a very low number slows a GPU down."""

    sample_freq: PositiveInt | None = None
    """Number of steps from one sample to the next: the model continues `sample_prompt`, in the log and in TensorBoard,
    and again after the last step. None writes no samples, and a pipeline or context parallelism has none. Not in
    torchtitan."""

    sample_prompt: str = "The "
    """Beginning of each sample. Choose one that suits the data. Not in torchtitan."""

    enable_tensorboard: bool = False
    """Writes the metrics for TensorBoard too."""

    disable_color_printing: bool = False
    """Prints log lines without colour. Set it where the log shows escape codes."""

    save_tb_folder: str = "tb"
    """Name of the folder for TensorBoard's files, inside the run folder."""

    enable_wandb: bool = False
    """Sends the metrics to Weights & Biases too. This needs `pip install wandb`; the WANDB_* environment variables
    apply."""


class Comm(Section):
    """Collectives between ranks: their timeouts, the records NCCL keeps of them, and the dry run without them."""

    mode: Literal["default", "fake_backend"] = "default"
    """`default` trains. `fake_backend` makes a dry run instead: one process builds the model for WORLD_SIZE ranks and
    prints the memory and the traffic of each pipeline rank."""

    init_timeout_seconds: Seconds = 300
    """Longest time, in seconds, that a rank waits for a collective during the start and the first step. Raise it if
    loading or compiling takes longer."""

    train_timeout_seconds: Seconds = 100
    """Longest time, in seconds, that a rank waits for a collective after the first step. Raise it if a rank needs
    longer between two collectives."""

    trace_buf_size: Annotated[int, Field(ge=0)] = 20000
    """Number of latest collectives that NCCL records on each rank, and writes to a file when one times out. 0 switches
    this off; on a CPU the key does nothing."""

    save_traces_folder: str = "comm_traces"
    """Name of the folder for NCCL's records, inside the run folder."""

    save_traces_file_prefix: Annotated[str, Field(pattern="^[^/]*$")] = "rank_"
    """The names of NCCL's files start with this text; the rank follows."""


class Debug(Section):
    """Seed and determinism."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed of the initial weights and of the order of the data. Without one, the run draws a seed, logs it and writes
    it to config.toml in the run folder; set that seed to repeat the run."""

    deterministic: bool = False
    """Uses only deterministic kernels, so that the same run gives the same result to the bit. This is slower on GPUs,
    and an operation without such a kernel stops the run."""

    deterministic_warn_only: bool = False
    """With `deterministic`, an operation without a deterministic kernel causes a warning instead of an error."""
