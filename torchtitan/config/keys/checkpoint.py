"""Keys of checkpoints: when a run is saved, and where it starts."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class Checkpoint(Section):
    """Save the run, resume it, or start from the weights of another run."""

    enable: bool = False
    """Saves checkpoints, and resumes from the newest complete one when the same command is given again."""

    folder: Annotated[str, Field(min_length=1)] = "checkpoint"
    """Where checkpoints are written: a name inside the run folder, or a URL that fsspec knows, for example
    s3://bucket/run."""

    interval: PositiveInt = 500
    """Number of steps from one save to the next."""

    interval_minutes: PositiveFloat | None = None
    """Also saves when this many minutes have passed since the last save began. Set it to limit how much time a failure
    can cost. Not in torchtitan."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """`disabled`: training waits until the checkpoint is written. `async`: training waits only for a copy to host
    memory, which a thread writes. `async_with_pinned_mem`: the same with pinned memory, which GPUs copy to faster."""

    keep_latest_k: NonNegativeInt = 10
    """Number of complete checkpoints to keep; older ones are removed. 0 keeps all."""

    keep_best: str | None = None
    """Also keeps the checkpoint of the best validation: of the lowest "loss", or, of a model of one's own, of the
    highest metric of this name, or the lowest with a hyphen before it ("-error"). Each validation is saved then."""

    load_step: Annotated[int, Field(ge=-1)] = -1
    """Step to resume from; -1: the newest complete checkpoint. The run sets later checkpoints aside, and a copy of its
    records."""

    initial_load_path: str | None = None
    """What to start from as long as the run has no checkpoint of its own: a folder step-N, or a folder of several, of
    which the newest is taken; or weights that another program saved: a file of safetensors or of torch.save, a folder
    of the hub, or the name of one in assets/hf."""

    initial_load_missing: list[str] = []
    """Names of weights, with `*`, that keep their first values where what `initial_load_path` names lacks them or has
    them in another shape, such as a new head. For a model of one's own."""

    initial_load_model_only: bool = True
    """Takes only the weights from `initial_load_path` and starts at step 0. Set it to false to take optimizer, data
    and step too."""

    initial_load_in_hf: bool = False
    """Reads `initial_load_path` as a folder of Hugging Face safetensors. Without a path, it reads
    `model.hf_assets_path`."""

    exclude_from_loading: list[Literal["optimizer", "dataloader", "train_state"]] = []
    """Parts that start afresh instead of being loaded from a checkpoint. `train_state` needs `initial_load_path`."""

    load_only: bool = False
    """Saves nothing. A run that resumes with this key writes its records to load_only/N in the run folder."""

    enable_first_step_checkpoint: bool = False
    """Also saves after the first step, to show early whether saving works."""

    create_seed_checkpoint: bool = False
    """Saves the initial state as step 0 and ends."""

    last_save_model_only: bool = False
    """Saves only the weights after the last step: the checkpoint is small, but the run cannot be resumed from it
    (torchtitan's default is true)."""

    last_save_in_hf: bool = False
    """With `last_save_model_only`, also writes the weights as safetensors, to the folder hf in the run folder. It does
    not go together with `load_only`."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """With `last_save_model_only`: type of the weights that are saved."""

    on_failure: Literal["continue", "stop"] = "continue"
    """What happens when a save fails: `continue` trains on and saves again at the next interval, `stop` ends the run.
    Not in torchtitan."""
