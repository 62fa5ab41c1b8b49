"""One process through train.py: repeatability, accumulation, validation, what it writes, and how it ends."""

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_runs import keys_read, read_records, tiny_config, train_here
from torchtitan import hardware
from torchtitan.config.load import load_config
from torchtitan.config.names import key_names
from torchtitan.config.schema import Checkpoint, Config, Optimizer, Parallelism, Training
from torchtitan.hardware import Peak, Place
from torchtitan.models.families import plan_model
from torchtitan.observe.health import NotFiniteError
from torchtitan.tools.dry_run.report import dry_run
from torchtitan.training.machine import check_machine

ROOT = Path(__file__).parents[3]
CHATS = ROOT / "tests/assets/chat"
KEYS = [
    "step", "loss", "max_loss", "grad_norm", "lr", "tokens_seen", "tokens_per_second", "tflops", "mfu", "memory_gib",
    "step_seconds", "data_seconds",
]  # fmt: skip


FLOAT8: dict[str, Any] = {"model__converters": ["quantize.linear.float8"], "quantize__linear__float8__emulate": True}


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records]


def test_the_same_run_twice_is_the_same_to_the_bit(tmp_path: Path) -> None:
    first, again, other = (
        train_here(tiny_config(tmp_path / name, debug__seed=seed, debug__deterministic=True))
        for name, seed in [("first", 5), ("again", 5), ("other", 6)]
    )
    torch.use_deterministic_algorithms(False)
    for key in ("loss", "grad_norm", "lr"):
        assert [r[key] for r in first] == [r[key] for r in again]
    assert losses(first) != losses(other)


@pytest.mark.parametrize("mask", ["causal", "block_causal"])
def test_accumulated_local_batches_equal_one_big_batch(tmp_path: Path, mask: str) -> None:
    """Under block_causal they have different numbers of labels that count."""
    whole = train_here(tiny_config(tmp_path / "whole", model__attn_mask_type=mask))
    parts = train_here(tiny_config(tmp_path / "parts", model__attn_mask_type=mask, training__local_batch_size=2))
    for ours, reference in zip(parts, whole, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_a_record_has_every_number_and_reads_back_exactly(tmp_path: Path) -> None:
    records = train_here(tiny_config(tmp_path, training__steps=7, metrics__log_freq=3))
    assert [record["step"] for record in records] == [1, 3, 6, 7]
    for record in records:
        assert list(record)[: len(KEYS)] == KEYS
        assert record["tokens_seen"] == record["step"] * 8 * 64
        assert record["tokens_per_second"] == pytest.approx(8 * 64 / record["step_seconds"])
        assert 0 <= record["data_seconds"] < record["step_seconds"] and 0 < record["mfu"] < 1.5
        assert json.loads(json.dumps(record)) == record
    every_step = losses(train_here(tiny_config(tmp_path, training__steps=7)))
    assert records[1]["loss"] == pytest.approx(sum(every_step[1:3]) / 2, rel=1e-12)
    assert records[2]["loss"] == pytest.approx(sum(every_step[3:6]) / 3, rel=1e-12)


def test_a_peak_that_was_measured_too_low_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    for origin in ("data sheet", "measured"):
        monkeypatch.setattr(hardware, "find_peak", lambda *_, origin=origin: Peak(1e6, origin))
        records = train_here(tiny_config(tmp_path / origin, training__steps=3))
        assert all(record["mfu"] > 1 for record in records)
        told = {record.getMessage() for record in caplog.records if "MFU is too high" in record.getMessage()}
        assert len(told) == (origin == "measured")


class CountedReads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.operations[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_the_host_reads_from_the_device_only_at_logged_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps and two records more cost two reads more; what start-up reads is the same in both runs."""
    reads: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any) -> Any:
            reads[name] += 1
            return original(self, *args)

        return read

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    totals = []
    for steps in (4, 12):
        reads.clear()
        with CountedReads() as dispatched:
            config = tiny_config(tmp_path, training__steps=steps, metrics__log_freq=4, training__on_nonfinite="skip")
            train_here(config)
        totals.append(reads + dispatched.operations)
    assert totals[1] - totals[0] == {"tolist": 2}


def test_tensorboard_shows_the_run(tmp_path: Path) -> None:
    records = train_here(tiny_config(tmp_path, training__steps=4, metrics__enable_tensorboard=True))
    curves = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in curves.Scalars("loss/train")] == [1, 2, 3, 4]
    assert [event.value for event in curves.Scalars("loss/train")] == pytest.approx(losses(records))


def test_weights_and_biases_gets_the_run_offline(tmp_path: Path) -> None:
    """In a process of its own: the package leaves threads and hooks behind."""
    program = (
        "from tests.tiny_runs import *\n"
        f"train_here(tiny_config({str(tmp_path)!r}, training__steps=2, metrics__enable_wandb=True))"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, timeout=90)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


def test_the_run_folder_repeats_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train_here(tiny_config(tmp_path / "a", debug__seed=11, training__steps=3, job__print_config=True))
    assert "seed = 11" in capsys.readouterr().out
    config = load_config(
        ["--job.config_file", str(tmp_path / "a/config.toml"), "--job.dump_folder", str(tmp_path / "b")]
    )
    assert losses(train_here(config)) == losses(first)


def test_samples_are_logged_and_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = train_here(tiny_config(tmp_path / "plain", training__steps=5))
    keys = {"metrics__sample_freq": 2, "metrics__sample_prompt": "The module", "metrics__enable_tensorboard": True}
    with caplog.at_level(logging.INFO, "torchtitan"):
        shown = train_here(tiny_config(tmp_path / "shown", training__steps=5, **keys))
    assert losses(shown) == losses(plain)
    said = [message for message in caplog.messages if message.startswith("sample after step")]
    assert [message.split()[3] for message in said] == ["2:", "4:", "5:"] and "The module" in said[0]
    assert said[0].partition(": ")[2] != said[1].partition(": ")[2]
    events = EventAccumulator(str(tmp_path / "shown/tb")).Reload()
    assert {"sample/text_summary", "configuration/text_summary"} <= set(events.Tags()["tensors"])


def test_a_seed_that_was_drawn_is_written_down(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, training__steps=1)
    config = config.model_copy(update={"debug": config.debug.model_copy(update={"seed": None})})
    train_here(config)
    assert "seed = " in (tmp_path / "config.toml").read_text()


def test_an_earlier_runs_files_are_kept_aside(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        train_here(tiny_config(tmp_path, training__steps=steps, metrics__enable_tensorboard=True))
        (tmp_path / "hf").mkdir()
    assert len(read_records(tmp_path)) == 3
    assert [len(read_records(tmp_path / "earlier" / n)) for n in "12"] == [1, 2]
    assert len(list((tmp_path / "tb").glob("events*"))) == 1 and (tmp_path / "earlier/2/tb").is_dir()
    assert (tmp_path / "earlier/2/hf").is_dir()


def test_data_that_runs_out_ends_the_run_with_its_last_steps_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    caplog.set_level(logging.INFO, "torchtitan")
    corpus = tmp_path / "short.jsonl"
    corpus.write_text("".join(f'{{"text": "{"word " * 200}"}}\n' for _ in range(16)))
    config = tiny_config(tmp_path / "run", training__dataset_path=str(corpus), metrics__log_freq=4)
    records = train_here(config)
    last = records[-1]["step"]
    assert 4 < last < 10 and last % 4
    assert f"the data ends after step {last}" in caplog.text
    longer = tiny_config(tmp_path / "longer", training__dataset_path=str(corpus), training__epochs=2)
    assert len(train_here(longer)) == 10 and "epoch 2" in caplog.text


def test_validation_is_the_same_each_time_and_leaves_training_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "validation__enable": True,
        "validation__dataset": "pydocs_validation",
        "validation__seq_len": 64,
        "validation__freq": 4,
        "validation__steps": 3,
    }
    plain = train_here(tiny_config(tmp_path / "plain"))
    watched = train_here(tiny_config(tmp_path / "watched", **options))
    assert losses(plain) == losses(watched)
    seen = read_records(tmp_path / "watched", "validation.jsonl")
    # After the last step, too.
    assert [v["step"] for v in seen] == [4, 8, 10] and all(v["validation_tokens"] == 3 * 8 * 64 for v in seen)
    still = options | {"optimizer__lr": 1e-12, "optimizer__weight_decay": 0.0}
    train_here(tiny_config(tmp_path / "still", **still))
    values = [v["validation_loss"] for v in read_records(tmp_path / "still", "validation.jsonl")]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"training__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"},
        {"activation_checkpoint__mode": "full"},
        pytest.param({"compile__enable": True, "compile__backend": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "compile__enable": True,
                "compile__backend": "aot_eager_decomp_partition",
                "activation_checkpoint__mode": "memory_budget",
                "activation_checkpoint__memory_budget": 0.3,
            },
            marks=pytest.mark.slow,
        ),
        {"optimizer__implementation": "foreach"},
        {"training__enable_cpu_offload": True},
    ],
    ids=["bfloat16 throughout", "full recompute", "compiled", "compiled with a memory budget", "foreach", "offload"],
)
def test_an_option_trains_as_the_plain_run_does(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = losses(train_here(tiny_config(tmp_path / "plain", training__steps=4)))
    other = losses(train_here(tiny_config(tmp_path / "other", training__steps=4, **options)))
    assert other == pytest.approx(plain, rel=5e-3 if "training__dtype" in options else 1e-5)


def test_profiler_traces_are_written_where_asked(tmp_path: Path) -> None:
    options = {"profile_freq": 4, "profiler_warmup": 1, "profiler_active": 1, "save_traces_folder": "traces"}
    config = tiny_config(
        tmp_path,
        training__steps=11,  # ends before the step of a third trace
        profiling__enable_profiling=True,
        **{f"profiling__{k}": v for k, v in options.items()},
    )
    train_here(config)
    traces = sorted(tmp_path.glob("traces/*/rank0.json"))
    assert [path.parent.name for path in traces] == ["step_4", "step_8"]
    assert "traceEvents" in json.loads(traces[0].read_text())


def test_a_trace_takes_no_training_time_and_may_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(profiler: torch.profiler.profile, path: str) -> None:
        time.sleep(1)
        if "step_6" in path:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write)
    profiling = {"profiling__enable_profiling": True, "profiling__profile_freq": 3, "profiling__profiler_warmup": 1}
    records = train_here(tiny_config(tmp_path, training__steps=8, **profiling))
    assert len(records) == 8 and max(record["step_seconds"] for record in records[3:]) < 1
    assert "a profiler trace could not be written to " in caplog.text and "No space left on device" in caplog.text


@pytest.mark.slow
def test_every_key_is_read_by_a_run(tmp_path: Path) -> None:
    """Watches a run that has everything switched on, from the moment its configuration is final."""
    common: dict[str, Any] = {
        "training__steps": 4,
        "validation__enable": True,
        "validation__dataset": "pydocs_validation",
        "validation__seq_len": 64,
        "validation__steps": 1,
        "profiling__enable_profiling": True,
        "metrics__enable_tensorboard": True,
        "metrics__sample_freq": 2,
        "debug__deterministic": True,
        "compile__enable": True,
        "compile__backend": "aot_eager_decomp_partition",
    }
    runs = [
        tiny_config(tmp_path / "1", **common, activation_checkpoint__mode="selective", lr_scheduler__decay_ratio=0.5),
        tiny_config(tmp_path / "2", **common, activation_checkpoint__mode="memory_budget"),
    ]
    end = {"checkpoint__last_save_model_only": True, "checkpoint__last_save_in_hf": True}
    chats = {"training__dataset_path": CHATS / "train.jsonl", "training__chat": "all"}
    chats |= {"model__chat_template": CHATS / "chat_template.jinja", "model__attn_mask_type": "block_causal"}
    runs.append(tiny_config(tmp_path / "3", training__steps=1, checkpoint__enable=True, **end, **chats))
    runs.append(
        tiny_config(
            tmp_path / "4",
            **FLOAT8,
            training__steps=2,
            checkpoint__enable=True,
            checkpoint__interval=1,
            checkpoint__initial_load_path=tmp_path / "3",
        )
    )
    split = {"parallelism__pipeline_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2}
    on_four = tiny_config(tmp_path, 4, **split)
    with keys_read() as read:
        for config in runs:
            train_here(config)
        dry_run(
            on_four, plan_model(on_four), Place(0, 0, 4)
        )  # the only run here that has a pipeline and splits tensors
    torch.use_deterministic_algorithms(False)
    read.add("job.config_file")  # read from the command line, before there is a configuration
    # Memory snapshots need a GPU: what is read of them here is that they are off.
    read.add("profiling.save_memory_snapshot_folder")
    read.update({"comm.trace_buf_size", "comm.save_traces_file_prefix"})  # NCCL's, which only a GPU has
    read.add("checkpoint.on_failure")  # none fails here
    read.add("validation.tasks_limit")  # of tasks (tests/recipe/scores)
    read.add("comm.mode")  # read at the head of train.py, before there is a run
    unread = set(key_names()) - read
    # The fleet's, and those of adapters (tests/recipe/lora/test_lora_files.py).
    assert sorted(key for key in unread if not key.startswith(("swarm.", "lora."))) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__hf_assets_path": "nowhere"}, "nowhere"),
        ({"model__vocab_size": 100}, "the tokenizer has 2048 ids, but tests.tiny_models:LLAMA tiny has only 100 rows"),
        ({"training__dataset": "pydoc"}, "training: dataset = 'pydoc' .* did you mean 'pydocs'"),
        ({"training__sources": [{"dataset": "a", "dataset_path": "no.txt"}]}, r"training.sources\[0\]: .*'no.txt': no"),
        ({"validation__enable": True, "validation__dataset_path": "no.txt"}, "validation: dataset_path = 'no.txt': no"),
        (
            {"checkpoint__enable": True, "checkpoint__initial_load_path": "nowhere"},
            'checkpoint.initial_load_path = "nowhere" is not there',
        ),
        ({"compile__enable": True, "compile__backend": "indcutor"}, 'compile.backend = "indcutor" is no backend'),
        (
            {
                "world_size": 2,
                "parallelism__tensor_parallel_degree": 2,
                "compile__enable": True,
                "activation_checkpoint__mode": "selective",
            },
            "tensor_parallel_degree = 2 cannot recompute whole blocks on a CPU",
        ),
        ({"profiling__enable_memory_snapshot": True}, "enable_memory_snapshot = true needs a GPU"),
        ({"model__converters": ["quantize.linear.float8"]}, "quantize.linear.float8 needs a GPU that multiplies"),
        (FLOAT8 | {"quantize__linear__float8__filter_fqns": ["layers", "output"]}, "leaves no layer of this model"),
        (FLOAT8 | {"quantize__linear__float8__filter_fqns": ["outptu"]}, 'names "outptu", which is in no linear layer'),
        (
            FLOAT8 | {"quantize__linear__float8__filter_fqns": ["auto_filter_small_kn", "output"]},
            "leaves no layer of this model",
        ),
    ],
    ids=[
        "no tokenizer",
        "small vocabulary",
        "unknown dataset",
        "no such source",
        "no validation data",
        "no such checkpoint",
        "unknown compiler",
        "whole blocks recomputed",
        "memory snapshot on a CPU",
        "float8 on a CPU",
        "float8 of no layer",
        "a filter without a match",
        "float8 of no layer that is large enough",
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_here(tiny_config(tmp_path, **options))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_float8_without_its_package_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match="needs the package torchao .*; pip install 'torchao>=0.18'"):
        train_here(tiny_config(tmp_path, **FLOAT8))


def test_asynchronous_tensor_parallelism_is_refused_on_a_cpu() -> None:
    config = Config(parallelism=Parallelism(enable_async_tensor_parallel=True, tensor_parallel_degree=2))
    with pytest.raises(ValueError, match="enable_async_tensor_parallel = true needs GPUs"):
        check_machine(config, torch.device("cpu"))


def test_a_place_for_checkpoints_that_nothing_here_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, reason in (("gs://bucket/run", "gcsfs"), ("s4://bucket/run", "Protocol not known: s4")):
        config = Config(checkpoint=Checkpoint(enable=True, folder=url))
        with pytest.raises(ValueError, match=f'"{url}" cannot hold checkpoints: .*{reason}.*; give a path, or a URL'):
            check_machine(config, torch.device("cpu"))


def test_a_schedule_that_an_older_torch_cannot_run_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule="DualPipeV")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(ValueError, match='"DualPipeV" needs torch 2.13 on a CPU: 2.11.0 begins with a message'):
        check_machine(Config(parallelism=schedule), torch.device("cpu"))


def test_a_pipeline_that_an_older_torch_cannot_run_for_ones_own_model_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(parallelism=Parallelism(pipeline_parallel_degree=2))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    check_machine(config, torch.device("cpu"))
    with pytest.raises(ValueError, match="_degree = 2 needs torch 2.13 for a model of your own: 2.11.0 wants"):
        check_machine(config, torch.device("cpu"), reads_text=False)


def test_what_an_older_torch_would_update_too_early_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(enable_cpu_offload=True, max_norm=math.inf)
    config = Config(optimizer=Optimizer(early_step_in_backward=True), training=training)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    check_machine(config, torch.device("cpu"))
    with pytest.raises(ValueError, match="enable_cpu_offload = true needs torch 2.13 on a GPU: 2.11.0 updates"):
        check_machine(config, torch.device("cuda"))


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="job.dump_folder = .* cannot be written: Not a directory; choose another"):
        train_here(tiny_config(tmp_path / "file" / "run"))


def test_the_program_shows_a_refusal_as_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = ["train.py", "--training.dataset", "pydoc", "--job.dump_folder", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        "error: training: dataset = 'pydoc' is not a name known here" in done.stderr and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("becomes", ["raise", "raise ImportError('half of torch is loaded') from None"])
def test_ctrl_c_ends_a_program_in_a_line_whatever_error_it_becomes(becomes: str) -> None:
    program = (
        "import os, signal\nfrom torchtitan.refusal import ends_in_a_line\nwith ends_in_a_line('stopped'):\n"
        f"    try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except KeyboardInterrupt:\n        {becomes}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_a_refused_run_leaves_the_last_runs_files_where_they_are(tmp_path: Path) -> None:
    train_here(tiny_config(tmp_path, training__steps=2))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no document"):
        train_here(tiny_config(tmp_path, training__dataset_path=str(tmp_path / "empty.jsonl")))
    torch.distributed.destroy_process_group()
    assert len(read_records(tmp_path)) == 2 and not (tmp_path / "earlier").exists()


def test_data_for_less_than_one_step_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "tiny.jsonl"
    corpus.write_text('{"text": "a"}\n' * 8)
    with pytest.raises(ValueError, match="before the first global batch of 512 tokens is full; use more text"):
        train_here(tiny_config(tmp_path / "run", training__dataset_path=str(corpus)))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, True),
        ({"optimizer__implementation": "foreach"}, False),
        ({"optimizer__early_step_in_backward": True}, False),
        ({"optimizer__name": "Muon"}, False),
    ],
    ids=["fused", "foreach", "in backward", "Muon"],
)
def test_a_stop_says_whether_the_bad_update_was_applied(
    tmp_path: Path, options: dict[str, Any], left_out: bool
) -> None:
    with pytest.raises(NotFiniteError, match="left out" if left_out else "was applied"):
        train_here(tiny_config(tmp_path, optimizer__lr=1e30, training__max_norm=math.inf, **options))
    torch.distributed.destroy_process_group()


def test_a_book_trains_and_a_part_of_it_is_held_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "book.txt").write_text("".join(f"Chapter {i}.\n\n{'some words here ' * 20}\n\n" for i in range(200)))
    config = tiny_config(
        tmp_path / "run",
        training__dataset_path=tmp_path / "book.txt",
        training__steps=2,
        validation__enable=True,
        validation__dataset="pydocs_validation",
        validation__seq_len=64,
        validation__steps=1,
        validation__freq=2,
    )
    with caplog.at_level("INFO"):
        assert len(train_here(config)) == 2
    assert "validation reads every 20th document of" in caplog.text
    assert [record["step"] for record in read_records(tmp_path / "run", "validation.jsonl")] == [2]
