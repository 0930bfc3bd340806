from toolkit.notebook.lesson import check


def test_an_open_prediction_is_asked_for_and_not_answered():
    verdict = check({"h2d": None, "d2h": 1}, {"h2d": 2, "d2h": 1}, why="because")
    assert not verdict.right
    assert "h2d" in repr(verdict)
    assert "trace says" not in repr(verdict)
    assert "because" not in repr(verdict)


def test_right_and_wrong_predictions_are_told_apart():
    wrong = check({"h2d": 1, "d2h": 1}, {"h2d": 2, "d2h": 1}, why="a token and a position")
    assert not wrong.right
    assert "not so: h2d - you said 1, the trace says 2" in repr(wrong)
    assert "right: d2h" in repr(wrong)
    assert check({"h2d": 2, "d2h": 1}, {"h2d": 2, "d2h": 1}).right
