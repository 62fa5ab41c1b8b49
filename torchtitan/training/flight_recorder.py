"""What NCCL keeps of a rank's last collectives, and writes when one times out. A run on a CPU does not load this."""

from pathlib import Path

from torchtitan.config.schema import Comm
from torchtitan.parallel.collectives import any_says_so


def flight_recorder(comm: Comm, run_folder: Path) -> dict[str, str]:
    """Environment variables with which NCCL writes a rank's last collectives to the run folder when one times out."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(comm.trace_buf_size),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(comm.trace_buf_size > 0)),
        "TORCH_FR_DUMP_TEMP_FILE": str(run_folder.absolute() / comm.save_traces_folder / comm.save_traces_file_prefix),
    }


def make_trace_folder(comm: Comm, run_folder: Path) -> None:
    """Create the folder for NCCL's traces, which NCCL itself does not create.

    Every rank calls this, after rank 0 has moved an earlier run's folder aside.
    """
    if comm.trace_buf_size:
        any_says_so(True)  # a barrier: rank 0 has moved the old folder by now
        (run_folder / comm.save_traces_folder).mkdir(parents=True, exist_ok=True)
