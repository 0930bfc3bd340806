"""Options that are True or False refuse anything else: a text such as "no" would count as true."""

import numpy as np
import pytest

import toolkit as tk
from toolkit.core.errors import ModelError, ToolkitError
from toolkit.core.flags import flag

OTHERS = ["no", "", 1, 0, None, [True], np.array(True), np.int64(1)]
REFUSED = {
    "fallback": lambda model, value: tk.generate(model, "One", fallback=value),
    "record": lambda model, value: tk.generate(model, "One", record=value),
    "lines": lambda model, value: tk.generate(model, "One", lines=value),
    "fallback of compare": lambda model, value: tk.compare(model, "One", fallback=value),
    "lines of compare": lambda model, value: tk.compare(model, "One", lines=value),
    "fuse": lambda model, value: tk.load("demo/qwen3", "cpu", fuse=value),
    "lines of record": lambda model, value: tk.record("cpu", lines=value),
    "lines of a device": lambda model, value: tk.device("cpu").record(lines=value).__enter__(),
    "lines of memory": lambda model, value: tk.memory("cpu", lines=value),
    "again": lambda model, value: tk.tune.warm("read", again=value),
    "trust": lambda model, value: tk.load_exported("a package", trust=value),
}


@pytest.fixture(scope="module")
def model():
    return tk.load("demo/qwen3", "cpu", progress=False)


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_a_flag_is_a_boolean(value):
    with pytest.raises(ModelError, match=r"^record=.*: neither True nor False\. Give one of them$"):
        flag("record", value, ModelError)


@pytest.mark.parametrize("value", [True, np.True_, np.bool_(1), False, np.False_], ids=repr)
def test_booleans_of_numpy_count(value):
    assert flag("record", value) is bool(value)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("value", ["x", 1], ids=repr)
def test_public_functions_refuse_what_is_not_a_boolean(model, name, value):
    with pytest.raises(ToolkitError) as caught:
        REFUSED[name](model, value)
    assert str(caught.value) == f"{name.split()[0]}={value!r}: neither True nor False. Give one of them"


def test_public_functions_accept_booleans_of_numpy(model):
    run = tk.generate(model, "One", max_new_tokens=2, record=np.True_, lines=np.False_, fallback=np.False_)
    assert run.recorded is not None
    assert tk.generate(model, "One", max_new_tokens=2, record=np.False_).recorded is None
    with tk.memory("cpu", lines=np.False_):
        tk.load("demo/qwen3", "cpu", fuse=np.False_, progress=np.False_)
