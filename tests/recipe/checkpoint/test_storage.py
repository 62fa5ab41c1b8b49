"""Which checkpoints count as complete, which are kept, and that reading one runs no code from it."""

import errno
import fcntl
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan.checkpoint.reading import _IndexUnpickler
from torchtitan.checkpoint.storage import Manifest, Storage

STATE = {"model.weight": torch.arange(12.0).view(3, 4), "optimizer.weight.step": torch.tensor(3.0)}


def save(storage: Storage, step: int) -> Manifest:
    dcp.save(STATE, storage_writer=storage.writer(step), no_dist=True)
    folder = storage.being_written(step)
    manifest = Manifest(step, storage.describe(folder, storage.names(folder)), {}, "1 rank", {}, {})
    storage.complete(manifest)
    return manifest


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_saved_tensors_are_read_back_and_steps_listed_newest_first(tmp_path: Path, scheme: str) -> None:
    storage = Storage(f"{scheme}{tmp_path}/checkpoint")
    assert storage.steps() == []
    for step in (9, 10):
        save(storage, step)
    assert storage.steps() == [10, 9]
    manifest = storage.examine(10)
    assert isinstance(manifest, Manifest) and storage.faults(manifest, manifest.files) == []
    read = {name: torch.empty_like(value) for name, value in STATE.items()}
    with storage.reading(10):
        dcp.load(read, storage_reader=storage.reader(10), no_dist=True)
    assert all(value.equal(STATE[name]) for name, value in read.items())
    storage.remove(storage.folder(10))
    assert storage.steps() == [9]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_is_damaged_is_not_complete_and_says_how(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = save(storage, 4)
    file = tmp_path / "step-4" / "__0_0.distcp"
    whole = file.read_bytes()

    file.write_bytes(whole[:-5])
    assert storage.examine(4) == f"__0_0.distcp has {len(whole) - 5} bytes, the manifest says {len(whole)}"
    file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    assert storage.examine(4) == manifest and storage.faults(manifest, manifest.files) == [
        "the checksum of __0_0.distcp differs"
    ]
    file.unlink()
    assert storage.faults(manifest, manifest.files) == ["__0_0.distcp is missing"]
    assert str(storage.examine(4)).startswith("__0_0.distcp is missing")
    intact = (tmp_path / "step-4" / "manifest.json").read_text()
    (tmp_path / "step-4" / "manifest.json").write_text(intact.replace("1 rank", "2 rank"))
    assert storage.examine(4) == "its manifest cannot be read (its own checksum differs)"
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "manifest.json").write_text(intact)
    assert str(storage.examine(5)).startswith("its manifest belongs to step 4")
    for text in ('{"step": 4', "null"):
        (tmp_path / "step-4" / "manifest.json").write_text(text)
        assert str(storage.examine(4)).startswith("its manifest cannot be read")
    (tmp_path / "step-4" / "manifest.json").unlink()
    assert str(storage.examine(4)).startswith("it has no manifest")
    (tmp_path / "step-6").touch()
    assert storage.examine(6) == "it is a file, not a folder"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_whose_files_are_on_another_node_is_not_complete(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    dcp.save(STATE, storage_writer=storage.writer(3), no_dist=True)
    with pytest.raises(OSError, match=r"step-3.writing has no __1_0.distcp, which another rank wrote; put it where"):
        storage.complete(Manifest(3, {"__1_0.distcp": (1, 1)}, {}, "2 ranks", {}, {}))
    assert storage.steps() == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_unfinished_save_is_no_checkpoint_and_is_swept_away(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    dcp.save(STATE, storage_writer=storage.writer(7), no_dist=True)
    assert storage.steps() == []
    assert storage.sweep() == ["step-7.writing"]
    assert list(tmp_path.iterdir()) == []


def unlink_as_nfs(unlink: Callable[..., None]) -> Callable[..., None]:
    """Refuse to remove a file that this process has open, as NFS does."""

    def refuse_open(path: Any, *args: Any, **keys: Any) -> None:
        if os.path.basename(path) in {os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in open_files()}:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, *args, **keys)

    def open_files() -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]

    return refuse_open


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_is_being_read_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path))
    save(storage, 1)
    with storage.reading(1):
        assert not Storage(str(tmp_path)).remove_unread(1)
    monkeypatch.setattr(fcntl, "flock", fcntl.lockf)  # NFS locks this way
    monkeypatch.setattr(os, "unlink", unlink_as_nfs(os.unlink))
    assert storage.remove_unread(1) and storage.steps() == []


class Harmful:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("harm was done"),))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_reading_a_checkpoint_runs_no_code_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = Storage(str(tmp_path))
    save(storage, 1)
    index = tmp_path / "step-1" / ".metadata"
    index.write_bytes(pickle.dumps(Harmful()))
    for text, why in (index.read_bytes(), "names (pathlib.Path.touch|builtins.getattr), which"), (b"none", "fails"):
        index.write_bytes(text)
        with pytest.raises(ValueError, match=why):
            storage.reader(1).read_metadata()
    dcp.save(STATE | {"extra": Harmful()}, storage_writer=storage.writer(2), no_dist=True)
    storage.complete(Manifest(2, {}, {}, "", {}, {}))
    with pytest.raises(ValueError, match="extra is no tensor"):
        storage.reader(2).read_metadata()
    assert not (tmp_path / "harm was done").exists()


def test_an_index_that_another_python_wrote_is_readable() -> None:
    for module in ("pathlib", "pathlib._local"):  # the second is Python 3.13's
        assert _IndexUnpickler(io.BytesIO()).find_class(module, "PosixPath") is PosixPath


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_manifest_is_json_for_people(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    save(storage, 3)
    read = json.loads((tmp_path / "step-3" / "manifest.json").read_text())
    assert read["step"] == 3 and set(read["files"]) == {".metadata", "__0_0.distcp"}
