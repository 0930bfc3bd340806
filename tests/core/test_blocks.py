"""Context managers that say how to use them."""

import pytest

import toolkit as tk
from toolkit.core.blocks import block
from toolkit.core.errors import ToolkitError

entered = []


@block("with kept(3) as x:")
def kept(x):
    """Keep x."""
    entered.append(x)
    try:
        yield x
    finally:
        entered.remove(x)


def test_a_block_is_a_context_manager_and_a_decorator():
    with kept(3) as x:
        assert (x, entered) == (3, [3])
    with pytest.raises(ZeroDivisionError), kept(3) as x:
        x / 0
    seen = kept(4)(lambda: list(entered))
    assert (seen(), seen(), entered) == ([4], [4], [])
    assert (kept.__name__, kept.__doc__) == ("kept", "Keep x.")


def test_a_block_says_how_to_use_it():
    assert repr(kept(1)) == "kept(...), to be used as `with kept(3) as x:`"
    assert repr(tk.record("virtual:h200")) == "tk.record(...), to be used as `with tk.record(device) as trace:`"
    assert repr(tk.copy_budget(h2d=0)).startswith("tk.copy_budget(...), to be used as `with tk.copy_budget(")
    assert repr(tk.tune.watch()).startswith("tk.tune.watch(...), to be used as `with tk.tune.watch()")


def test_a_block_that_was_used_before_says_so():
    once = kept(5)
    used = r"^kept\(\.\.\.\): this object was used before\. Call kept for each block"
    with once:
        with pytest.raises(ToolkitError, match=used), once:
            pass
        assert entered == [5]
    with pytest.raises(ToolkitError, match=used), once:
        pass
    assert entered == []
