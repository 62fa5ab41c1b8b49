"""Where a GPU is: all of the fleet that ask nvidia-smi count what torch counts."""

import os

import pytest
import torch

from titan_fleet.node.report import devices
from titan_fleet.reach.measure import facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif("CUDA_VISIBLE_DEVICES" in os.environ, reason="nvidia-smi lists also the GPUs that this hides"),
]


def test_all_who_ask_nvidia_smi_count_what_torch_counts() -> None:
    here = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    assert [device.name for device in devices()] == [each.name for each in here]
    assert [device.memory_bytes for device in devices()] == pytest.approx(
        [each.total_memory for each in here], rel=0.05
    )
    assert (facts()["gpus"], facts()["kind"]) == (len(here), here[0].name)
