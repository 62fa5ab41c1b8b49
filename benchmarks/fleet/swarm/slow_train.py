"""train.py, whose every update takes a quarter of a second more and no processor, as where an accelerator computes."""

import runpy
import time

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torchtitan.root import ROOT
from torchtitan.training.optimizer.muon import MuonAndAdamW

SECONDS = 0.25


def wait(optimizer: Optimizer, *_: object) -> None:
    if isinstance(optimizer, MuonAndAdamW):  # not the two inside it
        time.sleep(SECONDS)


if __name__ == "__main__":
    register_optimizer_step_post_hook(wait)
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
