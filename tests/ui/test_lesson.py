import pytest

from toolkit.ui.lessons.checks import check


def test_an_open_prediction_is_asked_for_and_not_answered():
    verdict = check({"h2d": None, "d2h": 1}, {"h2d": 2, "d2h": 1}, why="because")
    assert not verdict.right
    assert "h2d" in repr(verdict)
    assert "trace says" not in repr(verdict)
    assert "because" not in repr(verdict)


def test_right_and_wrong_predictions_are_told_apart():
    wrong = check({"h2d": 1, "d2h": 1}, {"h2d": 2, "d2h": 1}, why="a token and a position")
    assert not wrong.right
    assert "wrong: h2d - you said 1, the trace says 2" in repr(wrong)
    assert "right: d2h" in repr(wrong)
    assert check({"h2d": 2, "d2h": 1}, {"h2d": 2, "d2h": 1}).right


def test_estimates_need_only_come_near():
    near = check({"GB": 15}, {"GB": 15.14}, within=0.05, who="the catalogue")
    assert near.right
    assert "you said 15, the catalogue says 15.1" in repr(near)
    assert check({"tok/s": 118.4}, {"tok/s": 118.37}, within=0.001).right
    assert not check({"tok/s": 1e4}, {"tok/s": 118.37}, within=0.5).right
    assert "10,000" in repr(check({"tok/s": 1e4}, {"tok/s": 118.37}))


@pytest.mark.parametrize("value", ["two", [2], float("nan"), 2j], ids=str)
def test_what_is_no_number_is_not_right(value):
    verdict = check({"h2d": value}, {"h2d": 2}, why="because")
    assert not verdict.right
    assert "wrong: h2d" in repr(verdict)
