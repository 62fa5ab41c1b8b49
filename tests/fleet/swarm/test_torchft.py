"""torchft's DiLoCo as the reference: two sites with the same gradients end with the same weights."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_fleet.swarm import codec
from titan_fleet.swarm.fragments import Box
from titan_fleet.swarm.outer import Outer, mixed
from titan_fleet.swarm.syncer.state import FragmentState

DiLoCo: Any = pytest.importorskip("torchft.local_sgd", reason="has wheels for Linux on x86-64 only").DiLoCo
SHAPES = (6, 300), (4, 16)  # of two fragments
EVERY, MEETINGS, RATE, MOMENTUM, MIX = 4, 5, 0.7, 0.9, 0.25
GOALS = [
    [torch.randn(shape, generator=torch.Generator().manual_seed(10 * site)) for shape in SHAPES] for site in (0, 1)
]


def first() -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in SHAPES]


class Manager:
    """What DiLoCo asks of torchft's manager, between two threads."""

    _use_async_quorum = False

    def __init__(self, barrier: threading.Barrier, given: list[Any], site: int) -> None:
        self.barrier, self.given, self.site, self.commits = barrier, given, site, 0

    def current_step(self) -> int:
        return self.commits

    def should_commit(self) -> bool:
        self.commits += 1
        return True

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
        self.given[self.site] = tensor.clone()
        self.barrier.wait(20)
        tensor.copy_((self.given[0] + self.given[1]) / 2)
        self.barrier.wait(20)
        return SimpleNamespace(wait=lambda: True)

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def theirs() -> list[list[Tensor]]:
    """Each site's weights, trained by torchft."""
    barrier, given, models = threading.Barrier(2), [None, None], []

    def train(site: int) -> None:
        inner = torch.optim.SGD(models[site].parameters(), lr=0.1)
        parts = [nn.ParameterList([weight]) for weight in models[site]]
        outer = [torch.optim.SGD(p.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=True) for p in parts]
        manager: Any = Manager(barrier, given, site)
        with DiLoCo(manager, parts, inner, outer, sync_every=EVERY, fragment_update_alpha=MIX):
            for _ in range(EVERY * MEETINGS):
                for weight, goal in zip(models[site], GOALS[site], strict=True):
                    weight.grad = weight.detach() - goal
                inner.step()

    for _ in (0, 1):
        models.append(nn.ParameterList([nn.Parameter(weight) for weight in first()]))
    threads = [threading.Thread(target=train, args=(site,)) for site in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [[weight.detach() for weight in model] for model in models]


def ours(folder) -> list[list[Tensor]]:
    boxes = [Box(number, 0, shape[0], 0, shape[1]) for number, shape in enumerate(SHAPES)]
    syncer = [FragmentState(folder / str(box.weight), [box], "float32", Outer(RATE, MOMENTUM)) for box in boxes]
    for state, box, weight in zip(syncer, boxes, first(), strict=True):
        state.found("site-0", 0, [box], memoryview(codec.pack(weight, torch.empty(0), "float32")))
    sites, anchors = [first(), first()], first()
    for step in range(1, EVERY * MEETINGS + 1):
        for weights, goals in zip(sites, GOALS, strict=True):
            for weight, goal in zip(weights, goals, strict=True):
                weight -= 0.1 * (weight - goal)
        for number, state in enumerate(syncer):
            if (step - (number + 1) * EVERY // len(syncer)) % EVERY == 0:
                for site, weights in enumerate(sites):
                    body = codec.pack(*codec.encode(anchors[number] - weights[number], "float32"), "float32")
                    state.add(f"site-{site}", 0, state.version, step, 1, [boxes[number]], memoryview(body))
                state.merge("both")
                anchors[number] = state.anchor[0].clone()
                for weights in sites:
                    weights[number] = mixed(weights[number], weights[number].clone(), anchors[number], MIX)
    return sites


def test_five_meetings_of_two_fragments_end_with_torchfts_weights(tmp_path) -> None:
    for mine, other in zip(ours(tmp_path), theirs(), strict=True):
        for weight, reference, begin in zip(mine, other, first(), strict=True):
            torch.testing.assert_close(weight, reference, rtol=0, atol=1e-6)
            assert (weight - begin).abs().max() > 1
