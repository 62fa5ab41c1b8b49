"""`runs`: which runs there are, how far they came, and how two of them differ."""

import argparse
from pathlib import Path

import pytest

from tests.tiny_runs import tiny_config
from torchtitan.config.load import to_toml
from torchtitan.observe.run_folder import claim
from torchtitan.refusal import Refusal
from torchtitan.tools.runs import run


def make(folder: Path, *records: str, **overrides: object) -> Path:
    folder.mkdir(parents=True)
    config = tiny_config(folder, **overrides)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "metrics.jsonl").write_text("\n".join(records))
    return folder


def test_each_run_has_a_row_with_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = '{"step": %d, "loss": 3.25, "tokens_per_second": 1234.5}'
    make(tmp_path / "a/one", record % 10, job__description="the first")
    make(tmp_path / "b", record % 4, '{"step": 5, "lo')  # killed while it wrote
    make(tmp_path / "b/earlier/1", record % 3)
    going = make(tmp_path / "c")
    make(tmp_path / "d")
    (tmp_path / "d/config.toml").write_text("[")
    (make(tmp_path / "e") / ".lock").write_text("process 1 on another-host")
    lock = claim(going)
    run(argparse.Namespace(folder=str(tmp_path), compare=None), [])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    lock.close()
    assert rows[0] == ["run", "state", "step", "loss", "tok/s", "since", "description"]
    assert rows[1][:5] == [str(tmp_path / "a/one"), "ended", "10/10", "3.2500", "1,234"]
    assert rows[1][-2:] == ["the", "first"]
    assert rows[2][:3] == [str(tmp_path / "b"), "stopped", "4/10"]
    assert rows[3][:3] == [str(tmp_path / "c"), "running", "0/10"] and len(rows) == 6
    assert rows[4][1:3] == ["stopped", "-/-"] and "config.toml cannot be read: Invalid" in " ".join(rows[4])
    assert rows[5][1:3] == ["see", "another-host"]
    with pytest.raises(Refusal, match="holds no run"):
        run(argparse.Namespace(folder=str(tmp_path / "a/one/none"), compare=None), [])


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (
            '{"step": "many", "loss": [], "tokens_per_second": 1%s}' % ("0" * 400),
            "step = 'many': Input should be a valid",
        ),
        ('{"step": 5.5}', "step = 5.5: Input should be a valid integer"),
        ('{"step": 3, "loss": NaN}', "loss = nan: Input should be a finite number"),
        (f'{{"step": {2**64}}}', "step = 18446744073709551616: Input should be less than"),
        ("[" * 9000 + "\n[1]\n", "the last lines of metrics.jsonl are no records"),
    ],
)
def test_a_record_that_no_row_can_hold_is_a_dash_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str, why: str
) -> None:
    make(tmp_path / "a", record, job__description="\x1b]0;taken\x07")
    run(argparse.Namespace(folder=str(tmp_path), compare=None), [])
    said = capsys.readouterr().out
    assert "-" in said.split()[10] and said.split()[11] == "-" and why in said and "\x1b" not in said


def test_two_runs_are_compared_by_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", optimizer__lr=0.5)
    run(argparse.Namespace(folder="", compare=[str(a), str(b)]), [])
    assert capsys.readouterr().out == f"job.dump_folder: {a} | {b}\noptimizer.lr: 0.01 | 0.5\n"
