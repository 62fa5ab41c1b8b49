"""The checkpoints of a run on one process: which are saved, kept, skipped and refused."""

import errno
import logging
import math
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.checkpoint.manager import Checkpointer, SaveError
from torchtitan.checkpoint.storage import Storage, find_checkpoints
from torchtitan.config.load import ConfigError
from torchtitan.observe.health import NotFiniteError
from torchtitan.parallel import collectives
from torchtitan.training.checkpoints.saves import Saves

SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2, "lr_scheduler__total_steps": 10}


def run(folder: Path, steps: int = 4, **overrides: Any) -> list[dict[str, Any]]:
    try:
        return train_here(tiny_config(folder, training__steps=steps, **(SAVING | overrides)))
    finally:
        collectives.stop_process_group()  # a refused run leaves it running


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    storage = Storage(str(folder / "checkpoint"))
    kinds: Any = storage.reader(step).read_metadata().state_dict_metadata
    values = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    dcp.load(values, storage_reader=storage.reader(step), no_dist=True)
    return values


def steps_in(folder: Path) -> list[int]:
    return Storage(str(folder / "checkpoint")).steps()


def test_names_in_a_checkpoint_do_not_know_how_blocks_are_wrapped(tmp_path: Path) -> None:
    run(tmp_path / "plain", 1)
    run(tmp_path / "wrapped", 1, activation_checkpoint__mode="full")
    assert tensors(tmp_path / "plain", 1).keys() == tensors(tmp_path / "wrapped", 1).keys()


def test_a_resumed_run_is_the_same_to_the_bit_and_continues_its_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    through = run(tmp_path / "through", 6, metrics__log_freq=4)
    run(tmp_path / "in two", 3, metrics__log_freq=4)
    with caplog.at_level(logging.INFO):
        run(tmp_path / "in two", 6, metrics__log_freq=4)
    assert "resuming from step 3" in caplog.text and "trained 3 steps, to step 6, in " in caplog.text
    ours, theirs = tensors(tmp_path / "in two", 6), tensors(tmp_path / "through", 6)
    assert all(ours[name].equal(value) for name, value in theirs.items())
    assert [r["step"] for r in through] == [1, 2, 4, 6]
    assert [r["step"] for r in read_records(tmp_path / "in two")] == [1, 2, 3, 4, 6]
    assert not (tmp_path / "in two" / "earlier").exists()


VALIDATING = {
    "validation__enable": True,
    "validation__dataset": "pydocs_validation",
    "validation__seq_len": 64,
    "validation__steps": 1,
}


def test_a_save_after_a_validation_is_whole_and_no_validation_is_lost_or_repeated(tmp_path: Path) -> None:
    """A forward pass alone leaves gathered parameters of another type; the save must hold the trained ones."""
    options = VALIDATING | {"validation__freq": 2, "training__mixed_precision_param": "bfloat16"}
    run(tmp_path / "through", 6, **options)
    for steps in (3, 4, 6, 6):
        run(tmp_path / "in parts", steps, **options)
    ours, theirs = tensors(tmp_path / "in parts", 6), tensors(tmp_path / "through", 6)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(value) for name, value in theirs.items())
    assert any(name.startswith("optimizer.layers.0.") for name in ours)
    seen = [read_records(tmp_path / name, "validation.jsonl") for name in ("through", "in parts")]
    assert [record["step"] for record in seen[1]] == [2, 3, 4, 6] and seen[0] == [seen[1][i] for i in (0, 2, 3)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer__weight_decay_norms_and_biases": False, "optimizer__implementation": "foreach"},
        {"optimizer__moments_dtype": "bfloat16"},
        {"optimizer__name": "Muon"},
        {"optimizer__early_step_in_backward": True, "training__max_norm": math.inf},
    ],
    ids=["AdamW", "norms apart", "moments in bfloat16", "Muon", "updated in backward"],
)
def test_the_groups_in_which_parameters_are_updated_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Only a large model has several groups; a run resumes from a checkpoint that was saved with other groups."""
    run(tmp_path / "one", 4, **options)
    run(tmp_path / "then more", 2, **options)
    monkeypatch.setattr("torchtitan.training.optimizer.build._MOST_IN_A_GROUP", 4)
    run(tmp_path / "then more", 4, **options)
    ours, theirs = tensors(tmp_path / "then more", 4), tensors(tmp_path / "one", 4)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(value) for name, value in theirs.items())


@pytest.mark.parametrize("folder", ["saved", "checkpoint"])
def test_the_end_of_a_run_says_where_generate_finds_its_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    with caplog.at_level(logging.INFO):
        run(tmp_path, 2, checkpoint__folder=folder)
    said = re.search(r"let it talk: .* generate --checkpoint (\S+)", caplog.text)
    assert said and find_checkpoints(said[1])[0].steps() == [2]


def test_changed_keys_are_logged_and_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 2)
    with caplog.at_level(logging.INFO):
        records = run(tmp_path, 4, optimizer__lr=1e-3)
    assert "changed since that checkpoint: optimizer.lr = 0.001, was 0.01" in caplog.text
    assert records[-1]["lr"] < 1e-3


def test_another_model_is_refused_with_all_the_names_that_differ(tmp_path: Path) -> None:
    run(tmp_path, 1)
    with pytest.raises(
        ValueError,
        match=r'another model, or a part of one: model.layers.4.*and \d+ more; it was saved with model.flavor = "tiny"',
    ):
        run(tmp_path, 2, model__flavor="tiny-deep")
    run(tmp_path / "deep", 1, model__flavor="tiny-deep")
    with pytest.raises(ValueError, match=r"model.layers.4.\S+ is in no rank's model; .*and \d+ more; it was saved"):
        run(tmp_path / "deep", 2)


def test_another_optimizer_is_refused_unless_it_is_excluded_from_loading(tmp_path: Path) -> None:
    run(tmp_path, 1)
    with pytest.raises(ValueError, match=r'optimizer.name = "Muon", but step 1 in .* was saved with "AdamW"'):
        run(tmp_path, 2, optimizer__name="Muon")
    records = run(tmp_path, 2, optimizer__name="Muon", checkpoint__exclude_from_loading=["optimizer"])
    assert [record["step"] for record in records] == [1, 2]


def test_damaged_checkpoints_are_skipped_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 6)
    assert steps_in(tmp_path) == [6, 4, 2]
    file = tmp_path / "checkpoint/step-6/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (tmp_path / "checkpoint/step-4/manifest.json").unlink()
    run(tmp_path, 6)
    assert "skipped the checkpoint of step 6: the checksum of __0_0.distcp differs" in caplog.text
    assert "skipped the checkpoint of step 4: it has no manifest, so its save never finished" in caplog.text
    assert steps_in(tmp_path) == [6, 4, 2]
    with pytest.raises(ValueError, match="step 3 is not in .*, which has 6, 4, 2; name one of those"):
        run(tmp_path, 8, checkpoint__load_step=3)
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="step 6 in .* cannot be loaded: __0_0.distcp has"):
        run(tmp_path, 8, checkpoint__load_step=6)


def test_the_latest_are_kept(tmp_path: Path) -> None:
    run(tmp_path, 8, checkpoint__keep_latest_k=2)
    assert steps_in(tmp_path) == [8, 6]


def test_a_failed_save_is_logged_and_the_next_one_succeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("disabled", "async"):
        folder = tmp_path / mode
        real, Saves.save = Saves.save, blocked(Saves.save, folder, (2, 4))
        try:
            run(folder, 6, checkpoint__async_mode=mode)
        finally:
            Saves.save = real
        assert "saving step 2 failed: " in caplog.text and "saving step 4 failed: " in caplog.text
        assert steps_in(folder) == [6]
        assert [path.name for path in (folder / "checkpoint").iterdir()] == ["step-6"]  # no leftovers


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_best_checkpoint_that_could_not_be_saved_does_not_cost_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The loss of this model is lowest after step 4."""
    monkeypatch.setattr(Saves, "save", blocked(Saves.save, tmp_path, (4,)))
    options = {"checkpoint__keep_best": "loss", "checkpoint__keep_latest_k": 1, "checkpoint__async_mode": mode}
    options |= {"validation__enable": True, "validation__freq": 2, "training__epochs": -1}
    run(tmp_path, 8, model__name="tests.recipe.own_model.any_models:TURNING", **options)
    assert steps_in(tmp_path) == [8, 2]


def test_the_log_warns_when_the_disk_has_no_room_for_another_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "free_bytes", lambda self: 5 << 20)
    run(tmp_path)
    room = rf"{tmp_path}/checkpoint has 5 MiB free, a checkpoint takes 5; make room, or lower checkpoint.keep_latest_k"
    assert caplog.text.count(room) == 1  # before the second save: the first one gives the size


def test_a_failed_save_ends_the_run_if_it_is_the_last_or_on_failure_is_stop(tmp_path: Path) -> None:
    real = Saves.save
    for folder, step, asked, message in (
        ("asked", 2, {"checkpoint__on_failure": "stop"}, 'saving step 2 failed: .*checkpoint.on_failure = "stop"'),
        ("last", 4, {}, "the checkpoint of the last step, 4, could not be saved"),
    ):
        Saves.save = blocked(real, tmp_path / folder, (step,))
        try:
            with pytest.raises(SaveError, match=message):
                run(tmp_path / folder, 4, **asked)
        finally:
            Saves.save = real


def test_a_failed_asynchronous_write_ends_the_run_before_the_next_save(tmp_path: Path) -> None:
    real, Saves.save = Saves.save, blocked(Saves.save, tmp_path, (50,))
    try:
        with pytest.raises(SaveError, match="saving step 50 failed"):
            asked = {"checkpoint__on_failure": "stop", "checkpoint__async_mode": "async", "checkpoint__interval": 50}
            run(tmp_path, 100, lr_scheduler__total_steps=100, **asked)
    finally:
        Saves.save = real
    assert 50 <= read_records(tmp_path)[-1]["step"] < 100


def test_a_bad_loss_does_not_lose_an_asynchronous_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> None:
        time.sleep(1)
        write(*args)

    write = Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", slow)
    with pytest.raises(NotFiniteError, match="step 2: loss is "):
        run(
            tmp_path,
            checkpoint__async_mode="async",
            checkpoint__interval=1,
            optimizer__lr=1e30,
            training__max_norm=math.inf,
        )
    assert steps_in(tmp_path) == [1]


def blocked(save: Any, folder: Path, steps: tuple[int, ...]) -> Any:
    """Put a file where the save needs its folder."""

    def save_into_a_file(self: Any, step: int, *args: Any) -> None:
        if step in steps:
            (folder / "checkpoint").mkdir(exist_ok=True)
            (folder / f"checkpoint/step-{step}.writing").touch()
        save(self, step, *args)

    return save_into_a_file


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.observe.run_folder import claim

    claimed = claim(tmp_path)
    with pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} on .*; wait until it ends"):
        run(tmp_path, 1)
    claimed.close()
    run(tmp_path, 1)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ValueError, match=r"locks no files \(Function not implemented\); mount it with locks"):
        claim(tmp_path)


def test_another_run_begins_with_saved_weights_or_with_all_of_it(tmp_path: Path) -> None:
    first = run(tmp_path / "first", 4)
    path = str(tmp_path / "first/checkpoint/step-2")
    weights = run(tmp_path / "weights", 2, checkpoint__initial_load_path=path)
    assert [r["step"] for r in weights] == [1, 2] and weights[0]["loss"] < first[0]["loss"] - 0.05
    rest = run(tmp_path / "rest", 4, checkpoint__initial_load_path=path, checkpoint__initial_load_model_only=False)
    assert [r["loss"] for r in rest] == [r["loss"] for r in first[2:]]
    anew = run(
        tmp_path / "anew",
        4,
        checkpoint__initial_load_path=str(tmp_path / "first"),
        checkpoint__initial_load_model_only=False,
        checkpoint__exclude_from_loading=["train_state", "dataloader"],
    )
    assert [r["step"] for r in anew] == [1, 2, 3, 4]
    longer = run(
        tmp_path / "anew",
        6,
        checkpoint__initial_load_path=str(tmp_path / "first"),
        checkpoint__initial_load_model_only=False,
        checkpoint__exclude_from_loading=["train_state", "dataloader"],
    )
    assert [r["step"] for r in longer] == [1, 2, 3, 4, 5, 6]  # it resumes from its own checkpoint and takes all of it
    begun = {"checkpoint__initial_load_path": path, "optimizer__name": "Muon"}
    with pytest.raises(ValueError, match='exclude_from_loading = ."optimizer".'):
        run(tmp_path / "weights", 3, **begun)
    assert len(run(tmp_path / "weights", 3, **begun, checkpoint__exclude_from_loading=["optimizer"])) == 3
    with pytest.raises(ValueError, match="start this run again at step 0 and overwrite its records; remove"):
        run(tmp_path / "first", 6, checkpoint__exclude_from_loading=["train_state"])
    assert len(read_records(tmp_path / "first")) == 4
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r'initial_load_path = ".*nothing" has no complete checkpoint'):
        run(tmp_path / "none", 2, checkpoint__initial_load_path=str(tmp_path / "nothing"))


def test_weights_alone_can_be_saved_at_the_end_in_another_type_and_form(tmp_path: Path) -> None:
    end = {"checkpoint__last_save_model_only": True, "checkpoint__export_dtype": "bfloat16"}
    run(tmp_path, 4, checkpoint__last_save_in_hf=True, **end)
    saved = tensors(tmp_path, 4)
    assert all(name.startswith("model.") and value.dtype == torch.bfloat16 for name, value in saved.items())
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert exported["model.embed_tokens.weight"].equal(saved["model.tok_embeddings.weight"])
    with pytest.raises(ValueError, match="holds only weights.*; start another run, .*initial_load_path"):
        run(tmp_path, 6, **end)
    begun = {"checkpoint__initial_load_path": str(tmp_path), "checkpoint__initial_load_model_only": False}
    with pytest.raises(ValueError, match="holds only weights.*; set checkpoint.initial_load_model_only = true"):
        run(tmp_path / "begun", 6, **begun)
    from_run, from_hf = (
        run(tmp_path / name, 1, checkpoint__initial_load_path=str(path), checkpoint__initial_load_in_hf=name == "b")
        for name, path in (("a", tmp_path), ("b", tmp_path / "hf"))
    )
    assert from_run[0]["loss"] == from_hf[0]["loss"]
    with pytest.raises(ConfigError, match="last_save_in_hf = true applies to a last save of weights alone"):
        run(tmp_path / "c", 1, checkpoint__last_save_in_hf=True)


def test_hugging_face_weights_are_written_if_the_data_ends_at_a_saved_step(tmp_path: Path) -> None:
    corpus = tmp_path / "short.jsonl"
    corpus.write_text("".join(f'{{"text": "{"word " * 200}"}}\n' for _ in range(8)))
    end = {"checkpoint__last_save_model_only": True, "checkpoint__last_save_in_hf": True}
    records = run(tmp_path, 10, training__dataset_path=str(corpus), checkpoint__interval=1, **end)
    assert (last := records[-1]["step"]) == steps_in(tmp_path)[0] < 10
    assert {t.dtype for t in load_file(tmp_path / "hf/model.safetensors").values()} == {torch.float32}
    assert {name.partition(".")[0] for name in tensors(tmp_path, last)} == {"model", "optimizer", "data"}


def test_a_run_whose_data_ended_resumes_with_more_epochs(tmp_path: Path) -> None:
    corpus = tmp_path / "short.jsonl"
    corpus.write_text("".join(f'{{"text": "{"word " * 200}"}}\n' for _ in range(8)))
    once = {"training__dataset_path": str(corpus), "checkpoint__last_save_model_only": True}
    ended = run(tmp_path, 10, **once)[-1]["step"]
    assert ended < 6 and run(tmp_path, 6, training__epochs=-1, **once)[-1]["step"] == 6
    assert {name.partition(".")[0] for name in tensors(tmp_path, 6)} == {"model"}


def test_a_resumed_run_moves_the_hugging_face_weights_of_an_earlier_end_aside(tmp_path: Path) -> None:
    end = {"checkpoint__last_save_model_only": True, "checkpoint__last_save_in_hf": True, "checkpoint__interval": 2}
    run(tmp_path, 3, **end)
    run(tmp_path, 4, checkpoint__load_step=2, **end)  # step 3 has only weights
    files = [tmp_path / folder / "model.safetensors" for folder in ("hf", "earlier/1/hf")]
    assert files[0].read_bytes() != files[1].read_bytes()


def test_an_error_says_that_hugging_face_weights_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("torchtitan.weights.stored.write_hf", refuse)
    with pytest.raises(SaveError, match="step 1 is saved, but .*hf could not be written: rank 0: no"):
        run(tmp_path, 1, checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
    monkeypatch.undo()
    for _ in range(2):  # the same command writes them; a second time nothing is left to do
        run(tmp_path, 1, checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
        assert (tmp_path / "hf/model.safetensors").is_file()


def test_going_back_to_a_step_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    validating = VALIDATING | {"validation__freq": 2}
    run(tmp_path, 8, **validating)
    run(tmp_path, 5, checkpoint__load_step=2, optimizer__lr=1e-3)
    assert steps_in(tmp_path) == [5, 4, 2]
    kept = sorted(path.name for path in (tmp_path / "checkpoint").glob("*.aside-1"))
    assert kept == ["step-4.aside-1", "step-6.aside-1", "step-8.aside-1"]
    assert [record["step"] for record in read_records(tmp_path / "earlier/1")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "lr = 0.01" in (tmp_path / "earlier/1/config.toml").read_text()
    assert [record["step"] for record in read_records(tmp_path, "validation.jsonl")] == [2]
    run(tmp_path, 7, **validating)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["step"] for record in read_records(tmp_path, "validation.jsonl")] == [2, 6, 7]


def test_a_seed_checkpoint_is_the_initial_weights(tmp_path: Path) -> None:
    # These keys are for the end of a run and change nothing here.
    whatever = {
        "checkpoint__last_save_model_only": True,
        "checkpoint__last_save_in_hf": True,
    }
    run(tmp_path / "seed", 2, checkpoint__create_seed_checkpoint=True, **whatever)
    assert not (tmp_path / "seed/hf").exists() and steps_in(tmp_path / "seed") == [0]
    run(tmp_path / "seed", 2, checkpoint__create_seed_checkpoint=True, **whatever)  # the seed checkpoint exists already
    runs = [run(tmp_path / name, 2) for name in ("seed", "plain")]
    assert [r["loss"] for r in runs[0]] == [r["loss"] for r in runs[1]]
    with pytest.raises(ValueError, match="create_seed_checkpoint = true saves the initial weights, but .* at step 2"):
        run(tmp_path / "seed", 2, checkpoint__create_seed_checkpoint=True)


def test_load_only_saves_nothing(tmp_path: Path) -> None:
    run(tmp_path, 2)
    before = {path: path.read_bytes() for path in (tmp_path / "metrics.jsonl", tmp_path / "config.toml")}
    for number in (1, 2):
        run(tmp_path, 4, checkpoint__load_only=True, checkpoint__load_step=2, optimizer__lr=1e-3)
        assert [record["step"] for record in read_records(tmp_path / f"load_only/{number}")] == [3, 4]
    assert steps_in(tmp_path) == [2] and before == {path: path.read_bytes() for path in before}


def test_time_alone_or_being_the_first_step_can_make_a_save_due(tmp_path: Path) -> None:
    run(tmp_path / "time", 4, checkpoint__interval=100, checkpoint__interval_minutes=1e-9)
    run(tmp_path / "first", 4, checkpoint__interval=100, checkpoint__enable_first_step_checkpoint=True)
    assert steps_in(tmp_path / "time") == [4, 3, 2, 1] and steps_in(tmp_path / "first") == [4, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends_the_run_after_its_step(tmp_path: Path, number: int) -> None:
    def send() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "metrics.jsonl").exists() or len(read_records(tmp_path)) < 3:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    with pytest.raises(SystemExit) as ended:
        validating = VALIDATING | {"validation__freq": 1}
        run(tmp_path, 500, checkpoint__interval=5000, lr_scheduler__total_steps=500, **validating)
    sender.join()
    assert ended.value.code == 75
    (step,) = steps_in(tmp_path)
    assert read_records(tmp_path)[-1]["step"] == read_records(tmp_path, "validation.jsonl")[-1]["step"] == step < 500
