"""What a run shows: verdicts on numbers, records and curves across a resume, messages, the table of devices."""

import io
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan import hardware
from torchtitan.config.schema import Config, Job, Metrics
from torchtitan.observe import curve, heat, interrupt, live, metrics
from torchtitan.observe.health import judge_window
from torchtitan.observe.log import logger, start_logging, wants_color
from torchtitan.observe.metrics import Clock, MetricsWriter, StepRecord
from torchtitan.observe.weights_and_biases import import_wandb
from torchtitan.parallel.gpu_attention import Case, pick_attention
from torchtitan.training.stop import describe_stop

NAN, INF = math.nan, math.inf


def judge(losses: list[float], norms: list[float], skip: bool = True, in_a_row: int = 0, most: int = 2) -> Any:
    return judge_window(losses, norms, skip=skip, in_a_row=in_a_row, most_in_a_row=most)


def test_finite_numbers_go_on() -> None:
    verdict = judge([1.0, 2.0], [1.0, 1.0], in_a_row=2)
    assert (verdict.skipped, verdict.in_a_row, verdict.stop_at) == ((), 0, None)


@pytest.mark.parametrize(("loss", "norm"), [(NAN, NAN), (INF, 1.0), (1.0, INF)])
def test_without_skipping_the_first_bad_step_stops(loss: float, norm: float) -> None:
    verdict = judge([1.0, loss, NAN], [1.0, norm, NAN], skip=False)
    assert verdict.stop_at == 1 and verdict.reason == f"loss is {loss}, gradient norm is {norm}"


def test_skipped_updates_are_counted_across_windows_and_reset_by_a_good_step() -> None:
    verdict = judge([NAN, NAN, 1.0, NAN], [NAN, NAN, 1.0, NAN])
    assert (verdict.skipped, verdict.in_a_row, verdict.stop_at) == ((0, 1, 3), 1, None)
    verdict = judge([NAN, NAN], [NAN, NAN], in_a_row=1)
    assert verdict.stop_at == 1 and "3 updates in a row are left out" in verdict.reason


def test_a_bad_loss_with_a_finite_norm_was_not_skipped_so_it_stops() -> None:
    assert judge([INF], [1.0]).stop_at == 0


def test_a_stop_names_step_ranks_and_data() -> None:
    origins = {0: "a.jsonl:1", 1: "b.jsonl:2", 6: "c.jsonl:3"}
    text = describe_stop(7, "loss is nan", True, True, {0: 1.0, 1: NAN, 6: NAN}, origins)
    assert "step 7: loss is nan (on rank 1, 6)." in text and "was left out" in text
    assert "rank 1 read:\nb.jsonl:2" in text and "a.jsonl" not in text and 'set training.on_nonfinite = "skip".' in text
    many = {rank: f"{rank}.jsonl" for rank in range(9)}
    text = describe_stop(7, "gradient norm is inf", False, False, dict.fromkeys(many, 1.0), many)
    assert "every rank's own loss is finite" in text and "was applied" in text and "or lower optimizer.lr.\n" in text
    assert "3.jsonl" in text and "4.jsonl" not in text  # the lines of a thousand ranks would hide the message


def record(step: int) -> StepRecord:
    numbers = {"loss": 1 / step, "max_loss": 0.1 + 0.2, "grad_norm": 1e-30, "lr": 3e-4, "tokens_seen": step * 10}
    rates = {"tokens_per_second": 12345.6, "tflops": 1.5, "mfu": 0.321, "memory_gib": 2.0}
    times = {"step_seconds": 0.5, "data_seconds": 0.01, "forward_backward_seconds": 0.4, "update_seconds": 0.05}
    rest = {"eta_seconds": 3725.0, "skipped_updates": 0}
    return StepRecord(step=step, **numbers, **rates, **times, **rest)  # type: ignore[arg-type]


def write_steps(folder: Path, start_step: int, last: int) -> None:
    config = Config(job=Job(dump_folder=str(folder)), metrics=Metrics(enable_tensorboard=True))
    writer = MetricsWriter(config, folder, start_step, 100, tokens_at=lambda step: step * 10)
    for step in range(start_step + 1, last + 1):
        writer.write(record(step))
    writer.close()


def test_after_a_resume_records_and_curves_go_on_without_repeats(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 6)  # killed after step 6, its last checkpoint at step 4
    write_steps(tmp_path, 4, 8)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[2] == {"step": 3, **{k: v for k, v in vars(record(3)).items() if k not in ("step", "more")}}
    curve = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("loss/train")
    assert [event.step for event in curve] == list(range(1, 9))
    curve = EventAccumulator(str(tmp_path / "tb" / "over_tokens")).Reload().Scalars("over_tokens/loss")
    assert [event.step for event in curve] == list(range(10, 90, 10))


def test_a_number_that_is_not_finite_is_null_for_json(tmp_path: Path) -> None:
    lines = metrics.JsonLines(tmp_path / "m.jsonl", 0)
    lines.write(1, {"loss": NAN, "grad_norm": INF, "lr": 0.1})
    lines.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "loss": null, "grad_norm": null, "lr": 0.1}\n'


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', "\0" * 30])
def test_a_line_that_a_crash_has_cut_short_ends_no_resume(tmp_path: Path, tail: str) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + tail)
    lines = metrics.JsonLines(tmp_path / "m.jsonl", 1)
    lines.write(2, {})
    lines.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_costs_records_but_neither_the_run_nor_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    writer = MetricsWriter(Config(), tmp_path, 0, 100, tokens_at=lambda step: step * 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # the third record ends beyond it
        for step in range(1, 6):
            writer.write(record(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(record(6))
    writer.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps[0] == 1 and steps[-1] == 6 and len(steps) < 6
    assert "JsonLines could not write" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_a_disk_without_room_takes_no_record_away_and_curves_go_on_once_there_is_room(tmp_path: Path) -> None:
    history = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 200))
    (tmp_path / "metrics.jsonl").write_text(history)
    curves = metrics.TensorBoard(tmp_path / "tb", 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError):
            metrics.JsonLines(tmp_path / "metrics.jsonl", 150)
        with pytest.raises(OSError):
            for step in range(1, 200):
                curves.write(step, {"a": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    curves.write(200, {"a": 1.0})
    curves.close()
    assert (tmp_path / "metrics.jsonl").read_text() == history
    assert EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("a")[-1].step == 200


def test_a_logged_line_fits_in_100_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    caplog.set_level(logging.INFO, "torchtitan")
    write_steps(tmp_path, 0, 1)
    line = caplog.messages[-1]
    expected = ["step   1/100", "loss  1.0000", "grad ", "lr 3.0e-04", "12,346 tok/s", "MFU 32.1%", "2.00 GiB"]
    assert all(part in line for part in expected) and "\033" not in line and len(f"12:00:00 {line}") <= 100


def test_the_losses_are_drawn_at_the_end(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 8.0 / step if step != 5 else None} for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 41, "lo')
    (tmp_path / "validation.jsonl").write_text('{"step": 20, "validation_loss": 1.5}\n')
    curve.draw(tmp_path)
    with Image.open(tmp_path / "loss.png") as image:
        colors = {color for _, color in image.getcolors(100_000)}
    assert {curve._TRAINING, curve._VALIDATION} <= colors
    assert not (tmp_path / "experts.png").exists()
    assert curve.nice_ticks(0.2, 8) == [0, 2, 4, 6, 8] and len(curve.nice_ticks(3.0, 3.0)) > 1


def test_the_loads_of_experts_are_drawn_at_the_end(tmp_path: Path) -> None:
    records = [{"step": step, "expert_load_by_layer": [4.5, 1.0 if step > 2000 else 4.0]} for step in range(1, 4001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    curve.draw(tmp_path)
    with Image.open(tmp_path / "experts.png") as image:
        rows = [[image.getpixel((heat._LEFT + x, heat._TOP + y)) for x in (100, 700)] for y in (12, 36)]
    assert rows == [[heat._UNEVEN, heat._UNEVEN], [heat._UNEVEN, heat._EVEN]]


def test_a_terminal_shows_a_line_below_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    start_logging()
    shown = live.Live(0, 100)
    shown.recorded(10, 5.0, 1234.5, 90)
    shown.recorded(20, 4.0, 1234.5, 80)
    logger.info("a message")
    assert "·" in shown.line() and shown.line().endswith("20%  1:20 left  loss 4.0000 █▁  1,234 tok/s")
    shown.close()
    logger.info("the end")
    text = terminal.getvalue()
    assert "\r\033[K" in text and " a message\n\r\033[K████" in text and text.endswith("the end\n")


def test_time_outside_training_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    clock = Clock()
    now += 2
    with clock.outside_training():
        now += 50
    now += 1
    assert clock.read() == 3
    now += 4
    assert clock.read() == 4


def test_a_missing_optional_package_is_an_error_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        import_wandb()


def test_other_ranks_name_themselves_and_only_rank_0_informs(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torchtitan")
    kept = logger.handlers[:], logger.level, logger.propagate
    try:
        for rank in (0, 3):
            start_logging(rank)
            logger.info("told")
            logger.warning("careful")
        lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
        assert lines == ["told", "[rank 0] warning: careful", "[rank 3] warning: careful"]
    finally:
        logger.handlers[:], logger.level, logger.propagate = kept


def test_colour_is_for_terminals_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert wants_color(disabled=False) and not wants_color(disabled=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(disabled=False)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_a_known_devices_peak_is_its_data_sheets(name: str, tflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = hardware.find_peak(torch.device("cuda"), torch.bfloat16)
    assert (peak.flops, peak.origin) == (tflops * 1e12, "data sheet")


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_an_unknown_devices_peak_is_measured_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    hardware._measure_peak.cache_clear()
    monkeypatch.setattr(hardware, "measure_matmul_flops", lambda *_, **__: 5e12)
    assert hardware.find_peak(torch.device("cuda"), torch.bfloat16) == hardware.Peak(5e12, "measured")
    assert hardware.find_peak(torch.device("cpu"), torch.float32) == hardware.Peak(5e12, "measured")


def test_a_peak_is_measured_until_two_rounds_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for speeds, count, peak, spread in (
        ((4, 4.1), 2, 4.1, 0.024),
        ((2, 4, 3, 3.9, 9), 4, 4, 0.025),
        ((1, 2) * 9, 4, 2, 0),
    ):
        left = list(speeds)
        trial_or_round = lambda *given, left=left, **_: 1e12 if len(given) > 2 else left.pop(0)  # noqa: E731
        monkeypatch.setattr(hardware, "measure_matmul_flops", trial_or_round)
        hardware._measure_peak.cache_clear()
        found = hardware.find_peak(torch.device("cpu"), torch.float32)
        assert found == hardware.Peak(peak, "measured", pytest.approx(spread, abs=1e-3))
        assert len(speeds) - len(left) == count
    hardware._measure_peak.cache_clear()


@pytest.mark.parametrize(("trial", "size"), [(9e9, 256), (2e10, None)])
def test_a_type_that_a_cpu_has_no_instructions_for_is_measured_small(
    monkeypatch: pytest.MonkeyPatch, trial: float, size: int | None
) -> None:
    sizes = []
    monkeypatch.setattr(hardware, "measure_matmul_flops", lambda d, t, s=0.1, size=0: sizes.append(size) or trial)
    hardware._measure_peak.cache_clear()
    hardware.find_peak(torch.device("cpu"), torch.float16)
    hardware._measure_peak.cache_clear()
    assert sizes[1:] == [size, size]


@pytest.mark.parametrize(
    ("device", "used", "other_tflops", "says"),
    [
        ("cpu", "float32", 4.5, "bfloat16 multiplies 4.5 times as fast here: --training.mixed_precision_param"),
        ("cpu", "bfloat16", 3.0, "float32 multiplies 3.0 times as fast here: --training.mixed_precision_param"),
        ("cpu", "float32", 1.4, ""),
        ("cuda", "float32", 9.0, ""),
    ],
)
def test_advice_names_a_type_that_this_cpu_multiplies_faster(
    device: str, used: str, other_tflops: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {getattr(torch, used): 1e12}
    monkeypatch.setattr(
        hardware, "measure_matmul_flops", lambda device, dtype, seconds, size: rates.get(dtype, other_tflops * 1e12)
    )
    advice = hardware.advise_type.__wrapped__(torch.device(device), used)
    assert advice.rpartition(" ")[0] == says


def test_a_measured_peak_is_that_of_a_real_product() -> None:
    assert 1e9 < hardware.measure_matmul_flops(torch.device("cpu"), torch.float32, seconds=0.1) < 1e14


@pytest.mark.parametrize(
    ("ranks", "own", "parents", "kept"),
    [
        (2, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, [2, 3]),
        (8, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, None),  # fewer cores than ranks
        (2, {2, 3}, {0, 1, 2, 3}, None),  # something else has pinned the process
        (1, {0, 1}, {0, 1}, None),
    ],
)
def test_ranks_of_one_cpu_keep_to_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, ranks: int, own: set[int], parents: set[int], kept: list[int] | None
) -> None:
    calls: list[list[int]] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process: parents if process else own)
    monkeypatch.setattr(hardware.os, "sched_setaffinity", lambda process, cores: calls.append(cores))
    hardware.keep_to_own_cores(hardware.Place(1, 1, ranks), torch.device("cpu"))
    hardware.keep_to_own_cores(hardware.Place(1, 1, ranks), torch.device("cuda"))
    assert calls == ([] if kept is None else [kept])


BY_MASK = " under a mask of documents, because FlashAttention does not take torch.bfloat16 with heads of 64"


@pytest.mark.parametrize(
    ("capability", "cudnn", "seq_len", "keeps_apart", "cannot", "name", "second"),
    [
        ((9, 0), 91501, 512, False, [], "cuDNN", "FLASH_ATTENTION"),
        ((9, 0), 91501, 512, True, [], "FlashAttention, which knows where documents begin", ""),
        ((9, 0), 91501, 512, True, ["flash"], "cuDNN" + BY_MASK, "FLASH_ATTENTION"),
        ((9, 0), 91501, 448, False, [], "cuDNN", "FLASH_ATTENTION"),
        ((9, 0), 91501, 448, True, ["flash"], "memory-efficient attention" + BY_MASK, "EFFICIENT_ATTENTION"),
        ((9, 0), 91002, 512, False, [], "FlashAttention", "EFFICIENT_ATTENTION"),
        ((12, 0), 91501, 512, False, [], "FlashAttention", "EFFICIENT_ATTENTION"),
        ((9, 0), 91501, 512, False, ["cudnn", "flash"], "memory-efficient attention", "FLASH_ATTENTION"),
        ((8, 0), 91501, 512, False, [], "FlashAttention", "EFFICIENT_ATTENTION"),
        (
            (8, 0),
            91501,
            512,
            False,
            ["cudnn", "flash", "efficient"],
            "separate products and a softmax",
            "EFFICIENT_ATTENTION",
        ),
    ],
)
def test_attention_uses_the_fastest_kernel_that_the_gpu_can_run(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    cudnn: int,
    seq_len: int,
    keeps_apart: bool,
    cannot: list[str],
    name: str,
    second: str,
) -> None:
    empty = torch.empty
    for make in ("empty", "ones"):
        monkeypatch.setattr(torch, make, lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    for kernel in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{kernel}_attention", lambda taken, k=kernel: k not in cannot)
    chosen, context = pick_attention(Case(torch.device("cuda"), torch.bfloat16, 8, 2, 64, seq_len, keeps_apart))
    assert chosen == name
    if second:  # else no kernel of torch's choice
        with context:
            order = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
        assert [backend.name for backend in order][1] == second
    assert pick_attention(Case(torch.device("cpu"), torch.bfloat16, 8, 2, 64, 512, keeps_apart=False))[0] == ""


def test_a_process_started_alone_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert hardware.read_place() == hardware.Place(0, 0, 1)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert hardware.read_place() == hardware.Place(5, 1, 8)


def test_restarts_that_torchrun_could_not_carry_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    hardware.check_restarts(1)
    with pytest.raises(
        ValueError, match=r"--max_restarts = 3 could not bring this run back.*MAX_RESTARTS=3 ./run_llama"
    ):
        hardware.check_restarts(2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    hardware.check_restarts(2)


def test_a_gpu_that_torch_cannot_use_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(hardware, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="has NVIDIA GPUs, but torch .* cannot use them; install a CUDA build"):
        hardware.pick_device(0)
    for none in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert hardware.pick_device(0).type == "cpu"


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="local rank 2 has no GPU: this machine has 2; start at most that many"):
        hardware.pick_device(2)


@pytest.mark.parametrize(
    ("saves", "words"),
    [(True, "saves and ends after this step; a second signal"), (False, "ends after this step, unsaved")],
)
def test_the_first_signal_logs_whether_the_run_will_be_saved(
    saves: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupt.Interrupt(saves):
        start_logging(0, color=False)
        os.kill(os.getpid(), signal.SIGTERM)
    assert f"SIGTERM: the run {words}" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("number", "again", "name", "has_launcher"),
    [
        (signal.SIGTERM, signal.SIGTERM, "SIGTERM", False),
        (signal.SIGINT, signal.SIGINT, "Ctrl-C", False),
        (signal.SIGINT, signal.SIGTERM, "Ctrl-C", True),  # what torchrun makes of a second Ctrl-C
    ],
)
def test_a_second_signal_ends_the_process_at_once_but_not_one_of_the_same_warning(
    number: int, again: int, name: str, has_launcher: bool
) -> None:
    program = (
        "import os, time\n"
        "from torchtitan.observe import interrupt\n"
        f"interrupt._ONE_WARNING_SECONDS[{number:d}] = 0.5\n"
        f"with interrupt.Interrupt(has_launcher={has_launcher}) as asked:\n"
        f"    os.kill(os.getpid(), {number:d}), os.kill(os.getpid(), {number:d})\n"
        "    print(asked.asked, flush=True)\n"
        "    time.sleep(0.6)\n"
        f"    os.kill(os.getpid(), {again:d})\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + again, f"{name}\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_torchrun_passes_on_late_is_the_same_one(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(interrupt, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(interrupt.os, "_exit", lambda code: pytest.fail(f"the process ended with {code}"))
    with interrupt.Interrupt(has_launcher=True) as asked:
        asked._note(number, None)
        now[0] += 9
        asked._note(number, None)
    assert asked.is_asked()
