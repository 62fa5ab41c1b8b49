"""Damaged files are read or refused in a sentence; `python -m tests.house.fuzzing` tries more of them."""

from pathlib import Path

from tests.house.fuzzing import attack_all


def test_a_damaged_file_ends_in_no_traceback(tmp_path: Path) -> None:
    seen, tracebacks = attack_all(tmp_path, count=25, seed=3)
    assert not tracebacks, "\n".join(tracebacks[:5])
    assert sum(seen.values()) == 25 * 20 and sum(n for (_, ended), n in seen.items() if ended == "refused") > 100
