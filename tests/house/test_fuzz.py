"""Damaged files are read or refused in a sentence; `python -m tests.house.fuzzing` tries more of them."""

from pathlib import Path

from tests.house.fuzzing import attack_all, make_targets


def test_a_damaged_file_ends_in_no_traceback(tmp_path: Path) -> None:
    targets = make_targets(tmp_path)
    seen, tracebacks = attack_all(targets, count=15, seed=3)
    assert not tracebacks, "\n".join(tracebacks[:5])
    assert sum(seen.values()) == 15 * len(targets)
    assert sum(n for (_, ended), n in seen.items() if ended == "refused") > 50
