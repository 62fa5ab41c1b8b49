"""Which FlashAttention a GPU would take, with made-up packages and times: no GPU is needed."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from torchtitan.data.documents import document_starts
from torchtitan.parallel import gpu_attention
from torchtitan.parallel.documents.pieces import document_attention
from torchtitan.parallel.gpu_attention import Case

FIT = "_flash_attn_fwd = _flash_attn_bwd = print"


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[str, Any]]:
    """Returns what picks attention, on a GPU that takes every kernel, after packages were installed."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for kernel in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{kernel}_attention", lambda taken: True)
    monkeypatch.syspath_prepend(tmp_path)

    def pick(
        files: dict[str, str],
        times: dict[str | None, Any],
        keeps_apart: bool = False,
        results: dict[str | None, float] | None = None,
        in_pieces: bool = False,
    ) -> tuple[str, Any]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

        def milliseconds(_: Any) -> float:
            took = times[current_flash_attention_impl()]
            if isinstance(took, Exception):
                raise took
            return took

        def attend() -> list[torch.Tensor]:
            return [torch.ones(3), torch.tensor([1.0, (results or {}).get(current_flash_attention_impl(), 1.0)])]

        monkeypatch.setattr(gpu_attention, "trial", lambda *shape: attend)
        monkeypatch.setattr(gpu_attention, "_milliseconds", milliseconds)
        dtype = torch.bfloat16
        return gpu_attention.pick_attention(Case(torch.device("cuda"), dtype, 32, 8, 128, 8192, keeps_apart), in_pieces)

    yield pick
    for name in [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]:
        del sys.modules[name]


FA3, FA4 = "flash_attn_interface.py", "flash_attn/cute/interface.py"


@pytest.mark.parametrize(
    ("took", "keeps_apart", "name", "package", "first"),
    [
        (2.5, False, "FlashAttention 4 (forward and backward: cuDNN 4.00 ms, FlashAttention 4 2.50 ms)", "FA4", 1),
        (3.9, False, "cuDNN (forward and backward: cuDNN 4.00 ms, FlashAttention 4 3.90 ms)", None, 3),
        (2.5, True, "FlashAttention 4, which knows where documents begin (forward and backward: FlashAttention 4.00 ms,"
                    " FlashAttention 4 2.50 ms)", "FA4", None),
    ],
    ids=["faster", "hardly faster", "documents"],
)  # fmt: skip
def test_an_installed_flash_attention_computes_attention_if_it_is_faster(
    on_hopper: Any, took: float, keeps_apart: bool, name: str, package: str | None, first: int | None
) -> None:
    chosen, context = on_hopper({FA4: FIT}, {None: 4.0, "FA4": took}, keeps_apart)
    assert chosen == name and current_flash_attention_impl() is None
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    with context:
        order = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
        assert current_flash_attention_impl() == package
        assert order == before if first is None else int(order[0]) == first
    assert current_flash_attention_impl() is None


def test_a_package_that_fails_is_named_with_the_reason_and_torchs_kernel_stays(on_hopper: Any) -> None:
    files = {FA3: "raise ImportError('no libcudart.so.12\\nhere')", FA4: FIT}
    name, _ = on_hopper(files, {None: 4.0, "FA4": ValueError("too many values to unpack (expected 2)")})
    assert name == (
        "cuDNN (forward and backward: cuDNN 4.00 ms, FlashAttention 3 fails, ImportError: no libcudart.so.12, "
        "FlashAttention 4 fails, ValueError: too many values to unpack (expected 2))"
    )


@pytest.mark.parametrize(("result", "gap"), [(1.1, "7.1%"), (float("nan"), "nan%")])
def test_a_package_that_computes_something_else_is_named_and_torchs_kernel_stays(
    on_hopper: Any, result: float, gap: str
) -> None:
    name, _ = on_hopper({FA4: FIT}, {None: 4.0, "FA4": 2.5}, results={"FA4": result})
    why = f"its results differ from cuDNN's by {gap}, more than 2%"
    assert name == f"cuDNN (forward and backward: cuDNN 4.00 ms, FlashAttention 4 fails, {why})"
    name, _ = on_hopper({FA4: FIT}, {None: 4.0, "FA4": 2.5}, results={"FA4": 1.01})
    assert name.startswith("FlashAttention 4 ")


WHYS = ["not installed", "without a spec", "FlashAttention 2 alone", "an older GPU", "deterministic", "pieces"]


@pytest.mark.parametrize("why", WHYS)
def test_without_a_package_for_this_gpu_nothing_is_imported_or_measured(
    on_hopper: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    of_flash_2, without = {"flash_attn/__init__.py": ""}, dict.fromkeys(["not installed", "without a spec"], {})
    files = {**without, "FlashAttention 2 alone": of_flash_2}.get(why, {FA4: FIT, FA3: ""})
    if why == "an older GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: why == "deterministic")
    if why == "without a spec":
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    name, _ = on_hopper(files, {}, in_pieces=why == "pieces")
    assert name == ("FlashAttention" if why == "an older GPU" else "cuDNN")
    made = {"flash_attn"} if why == "without a spec" else set()
    assert {module for module in sys.modules if module.startswith("flash_attn")} == made


def test_all_ranks_take_what_is_fastest_on_the_slowest_rank(on_hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here FlashAttention 3 is missing on the other rank, and FlashAttention 4 is slower there than cuDNN."""
    others = iter([[1.0, 0.0], [4.0, 4.5]])
    monkeypatch.setattr(gpu_attention, "_worst", lambda mine: [*map(max, mine, next(others))])
    name, _ = on_hopper({FA3: "", FA4: FIT}, {None: 4.0, "FA4": 2.5})
    assert name == "cuDNN (forward and backward: cuDNN 4.00 ms, FlashAttention 4 4.50 ms)"


def test_what_was_active_before_is_active_again_even_after_an_activation_that_fails(on_hopper: Any) -> None:
    on_hopper({FA4: FIT, FA3: ""}, {None: 4.0, "FA4": 2.5})
    torch.nn.attention.register_flash_attention_impl("fails late", register_fn=_fail_late)
    for package in ("FA4", "fails late"):
        with suppress(RuntimeError), gpu_attention.attention_by([], package):
            assert current_flash_attention_impl() == "FA4"
        assert current_flash_attention_impl() is None and not torch._C._get_fa3_sdp_enabled()
    activate_flash_attention_impl("FA4")
    for package in ("FA4", "fails late"):
        with suppress(RuntimeError), gpu_attention.attention_by([], package):
            pass
        assert current_flash_attention_impl() == "FA4"
    restore_flash_attention_impl()


def _fail_late() -> None:
    torch._C._set_sdp_use_fa3(True)
    raise RuntimeError("late")


def test_a_trial_of_documents_has_unlike_lengths_and_empty_ones_as_a_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(starts)
        return document_attention(q, k, v, starts, starts)[0]

    monkeypatch.setattr(gpu_attention, "by_flash_attention", attend)
    results = gpu_attention.trial(Case(torch.device("cpu"), torch.float32, 4, 2, 8, 100, keeps_apart=True))()
    assert [tuple(result.shape) for result in results] == [(100, 4, 8), *[(1, 100, heads, 8) for heads in (4, 2, 2)]]
    numbers = np.repeat(np.arange(4), [40, 10, 30, 20])[None]
    assert seen[0].dtype == torch.int32 and seen[0].tolist() == document_starts(numbers)[0].tolist()


def test_a_graph_that_was_compiled_for_another_kernel_is_not_taken_from_the_cache() -> None:
    q = torch.randn(1, 2, 16, 8)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True) + 1

    found = []
    with fresh_cache(), torch.no_grad():
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            torch.compiler.reset()
            counters.clear()
            with gpu_attention.attention_by([backend]), torch.profiler.profile() as profile:
                torch.compile(attend)()
            is_flash = any("flash_attention" in event.key for event in profile.key_averages())
            hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
            found.append((is_flash, *hits))
    assert found == [(True, 0, 0), (False, 0, 0), (True, 1, 1)]
