"""Rows that begin alike share their beginning, and nothing else; test_tasks.py holds the figures against lm_eval."""

import torch

from torchtitan.training.scores.lines import Row, places_and_mask, plan_lines

QUESTION = [7, 8, 9, 7]
ROWS = [Row([*QUESTION, *answer], 4) for answer in ([1, 2, 3], [4], [5], [6, 2])]


def test_the_answers_of_a_question_are_one_line_and_do_not_see_each_other() -> None:
    (line,) = plan_lines(ROWS, can_share=True, longest=100)
    assert line.length == 4 + 2 + 1  # the last token of each is only predicted
    scored = [[(place, token) for place, token, owner in line.scored(ROWS) if owner == n] for n in range(4)]
    assert scored == [[(3, 1), (4, 2), (5, 3)], [(3, 4)], [(3, 5)], [(3, 6), (6, 2)]]
    found = places_and_mask([line], torch.Size([1, 8]), torch.device("cpu"))
    assert found is not None
    positions, seen = found[0][0], found[1][0, 0]
    assert positions.tolist()[:7] == [0, 1, 2, 3, 4, 5, 4]
    assert seen[5].tolist() == [True] * 6 + [False] * 2 and seen[6].tolist() == [True] * 4 + [False] * 2 + [True, False]


def test_a_line_is_a_text_where_no_rank_can_compute_under_a_mask() -> None:
    lines = plan_lines(ROWS, can_share=False, longest=100)
    assert [[number for number, _ in line.rows] for line in lines] == [[0], [1, 2], [3]]
    assert places_and_mask(lines, torch.Size([3, 8]), torch.device("cpu")) is None


def test_texts_that_have_little_in_common_stay_apart() -> None:
    texts = [Row([0, *range(10 * n, 10 * n + 9)], 1) for n in range(1, 4)]  # behind the token that begins all texts
    assert [line.length for line in plan_lines(texts, can_share=True, longest=100)] == [9, 9, 9]
    assert [line.length for line in plan_lines(ROWS, can_share=True, longest=6)] == [6, 5]
