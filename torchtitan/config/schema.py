"""Every key that a run understands, one frozen model per TOML section; no file of the schema imports torch.

Names and defaults are torchtitan v0.2.2's wherever torchtitan has the key; the help text of any other key ends with
"Not in torchtitan.". `torchtitan_keys.py` reads torchtitan's other keys.
"""

import pkgutil
from typing import Any

from pydantic import create_model

from torchtitan.config.keys.checkpoint import Checkpoint
from torchtitan.config.keys.model import ActivationCheckpoint, Compile, Float8, Lora, Model, Quantize
from torchtitan.config.keys.model import RopeScaling as RopeScaling
from torchtitan.config.keys.parallelism import Parallelism
from torchtitan.config.keys.run import Comm, Debug, Job, Metrics, Profiling
from torchtitan.config.keys.training import DataSource as DataSource
from torchtitan.config.keys.training import LRScheduler, Optimizer, Training, Validation
from torchtitan.config.section import OtherSection, Section
from torchtitan.root import PACKAGES


class Config(Section):
    """A complete run. Together with the data it determines all that `train.py` computes."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    lora: Lora = Lora()
    comm: Comm = Comm()
    validation: Validation = Validation()
    debug: Debug = Debug()

    @property
    def float8(self) -> Float8 | None:
        """How to compute in float8, if `model.converters` asks for it."""
        return self.quantize.linear.float8 if "quantize.linear.float8" in self.model.converters else None

    @property
    def trains_a_part(self) -> bool:
        """Whether some weights are frozen by this configuration."""
        return self.lora.rank is not None or bool(self.training.train_only)


# Sections of other packages, by name, for this package imports none: keys as strict as these, where the package is.
OTHERS = {"swarm": "titan_fleet.section:Swarm"}
_THERE = {package.name for package in PACKAGES}
_KINDS = {name: pkgutil.resolve_name(place) for name, place in OTHERS.items() if place.partition(".")[0] in _THERE}
_FIELDS: dict[str, Any] = {name: (kind, kind()) for name, kind in _KINDS.items()}
Whole: type[Config] = create_model("Whole", __base__=Config, __module__=__name__, __doc__=Config.__doc__, **_FIELDS)


def other_sections(config: Config) -> list[OtherSection]:
    return [section for _, section in config if isinstance(section, OtherSection)]
