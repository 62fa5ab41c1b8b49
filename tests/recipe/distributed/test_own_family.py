"""A family that exists only in a test's folder: trained on every axis, resumed elsewhere, converted, generated."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import differences
from tests.recipe.models import own_family
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.weights.stored import open_model

TP: dict[str, Any] = {"parallelism__tensor_parallel_degree": 2}
PP = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 4}
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 5}


def test_a_family_of_ones_own_needs_no_change_to_the_package(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shutil.copy(own_family.__file__, tmp_path / "mine.py")
    mine = {"model__name": f"{file}:SPEC", "model__flavor": "small"}
    alone = train_here(tiny_config(tmp_path / "alone", **mine))

    # PP 2 x FSDP 2 for six steps, the rest on CP 2 x TP 2
    run = tmp_path / "run"
    ranks(cases.train, 4, str(run), mine | PP | SAVING | {"training__steps": 6, "lr_scheduler__total_steps": 10})
    other = TP | {"parallelism__context_parallel_degree": 2}
    ranks(cases.train, 4, str(run), mine | other | SAVING)
    records = read_records(run)
    assert [record["step"] for record in records] == list(range(1, 11))
    assert differences(records, alone, "loss") <= 1e-5 and differences(records, alone, "grad_norm") <= 1e-4

    main(["convert", str(run), str(tmp_path / "hf")])
    with pytest.raises(SystemExit, match="model_type = 'mine', which no family here is; .* --model path"):
        main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")])
    main(["convert", str(tmp_path / "hf"), str(tmp_path / "back"), "--model", f"{file}:SPEC"])
    before, after = open_model(str(run)).weights, open_model(str(tmp_path / "back")).weights
    assert before.outline.keys() == after.outline.keys()
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.outline)

    texts = []
    for source, words in ((run, []), (tmp_path / "hf", ["--model", f"{file}:SPEC"]), (tmp_path / "back", [])):
        capsys.readouterr()
        main(["generate", "--checkpoint", str(source), "--prompt", "The", "--max_new_tokens", "8",
              "--temperature", "0", "--dtype", "float32", *words])  # fmt: skip
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0].startswith("The")
