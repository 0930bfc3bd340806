"""Tests of deriving the `where` column from stack frames recorded on other machines."""

from pathlib import Path

import pytest

import toolkit
from toolkit.trace.snapshot import frames
from toolkit.trace.snapshot.frames import Kinds, chain, short_file

PACKAGES = "/opt/venv/lib/python3.12/site-packages/"
TORCH = (PACKAGES + "torch/nn/modules/linear.py", 134)
CPP = [("??", 0), ("CUDACachingAllocator.cpp", 0), ("", 0), ("/src/aten/Blas.cpp", 812), ("libc.so.6", 12)]
CELL = ("/tmp/ipykernel_31/2045.py", 3)
KERNEL = [(PACKAGES + "ipykernel/zmqshell.py", 50), (PACKAGES + "ipykernel_launcher.py", 18), ("<frozen runpy>", 88)]


def of(*frames, shorten=None):
    return chain([{"name": "f", "filename": file, "line": line} for file, line in frames], shorten)


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([], None),
        (CPP, None),
        ([*CPP, TORCH], "torch/nn/modules/linear.py:134"),
        ([*CPP, TORCH, ("/home/me/model.py", 41), ("/home/me/train.py", 7)], "/home/me/train.py:7 > /home/me/model.py:41"),
        ([TORCH, ("/home/me/train.py", 7), ("/home/me/train.py", 7)], "/home/me/train.py:7"),
        ([TORCH, ("/home/me/model.py", 41), TORCH, CELL, *KERNEL], "2045.py:3 > /home/me/model.py:41"),
        ([TORCH, (PACKAGES + "transformers/a.py", 9), CELL, *KERNEL], "2045.py:3 > transformers/a.py:9"),
        ([TORCH, (PACKAGES + "transformers/a.py", 9), (PACKAGES + "b/c.py", 1)], "transformers/a.py:9"),
        (
            [("/usr/lib/python3.11/contextlib.py", 5), ("/home/me/a.py", 1), ("/usr/lib/python3.11/runpy.py", 8)],
            "/home/me/a.py:1",
        ),
        (
            [(PACKAGES + "typing_extensions.py", 9), ("/usr/lib/python3.11/logging/__init__.py", 5), ("/home/me/a.py", 1)],
            "/home/me/a.py:1",
        ),
        ([("/home/me/a.py", 1), ("/opt/venv/bin/torchrun", 8)], "/home/me/a.py:1"),
        ([("<eval_with_key>.3", 4), ("<stdin>", 1)], "<stdin>:1"),
        (
            [(PACKAGES + "triton/runtime/jit.py", 4), ("/home/me/kernels/triton/mine.py", 2)],
            "/home/me/kernels/triton/mine.py:2",
        ),
        ([("/x/toolkit/models/qwen3.py", 80), ("/home/me/a.py", 4)], "/home/me/a.py:4 > /x/toolkit/models/qwen3.py:80"),
        (
            [("/x/toolkit/kernels/norms.py", 80), ("/x/toolkit/ops/define.py", 80), ("/x/toolkit/ops/norms.py", 4)],
            "/x/toolkit/ops/norms.py:4",
        ),
        (
            [("/x/toolkit/gpu/cuda/device.py", 80), ("/x/toolkit/loading/huggingface.py", 4)],
            "/x/toolkit/loading/huggingface.py:4",
        ),
        (
            [("C:\\py\\Lib\\site-packages\\torch\\nn\\a.py", 2), ("D:\\me\\m.py", 3), ("C:\\Python311\\lib\\runpy.py", 88)],
            "D:/me/m.py:3",
        ),
    ],
)
def test_the_users_line_and_the_line_that_asked(frames, where):
    assert of(*frames) == where


def test_a_process_knows_which_packages_are_installed_in_it():
    """`pip install --target` puts packages into folders of any name."""
    files = [("/me/a.py", 3), ("/deps/pytest/__main__.py", 9)]
    stack = [{"name": "f", "filename": file, "line": line} for file, line in files]
    assert chain(stack) == "/deps/pytest/__main__.py:9 > /me/a.py:3"
    assert chain(stack, kinds=Kinds(lambda file: file.startswith("/deps/"))) == "/me/a.py:3"
    given = Kinds(is_library=lambda file: file == "/deps/tqdm.py")
    assert chain([{"name": "f", "filename": "/deps/tqdm.py", "line": 1}, *stack[:1]], kinds=given) == "/me/a.py:3"
    typed = [{"name": "<module>", "filename": "<stdin>", "line": 1}]
    assert chain(typed, kinds=Kinds(lambda file: True)) == "<stdin>:1"


def test_what_called_a_module_is_no_user_code():
    frames = [{"name": "<module>", "filename": "/me/a.py", "line": 3}, {"name": "run", "filename": "/me/launch.py", "line": 9}]
    assert chain(frames) == "/me/a.py:3"


def test_a_line_of_a_script_that_only_calls_is_left_out():
    stack = [{"name": name, "filename": "/me/a.py", "line": i} for i, name in enumerate(["make", "main", "<module>"], 1)]
    assert chain(stack) == "/me/a.py:3 > /me/a.py:1"
    assert chain(stack, only_calls=lambda file, line: (file, line) == ("/me/a.py", 3)) == "/me/a.py:2 > /me/a.py:1"
    assert chain(stack[2:], only_calls=lambda file, line: True) == "/me/a.py:3"


def test_a_place_starts_in_the_function_that_runs_the_block():
    """The functions that ran when the block began are the outermost ones of the stack."""
    names = ["forward", "step", "call", "run", "main", "<module>", "launch"]
    files = ["/me/net.py", "/me/train.py", TORCH[0], "/me/train.py", "/me/train.py", "/me/train.py", "/opt/venv/bin/torchrun"]
    stack = [{"name": name, "filename": file, "line": i} for i, (name, file) in enumerate(zip(names, files, strict=True), 1)]
    code = test_names_of_files_can_be_shortened_otherwise.__code__
    running = [code.replace(co_name=name, co_filename=file) for name, file in zip(names, files, strict=True)]
    began = [code]  # what ran when the block began, and has returned

    def line(within, only_calls=lambda file, line: False):
        return int(chain(stack, within=within, only_calls=only_calls).partition(" > ")[0].rpartition(":")[2])

    assert line([]) == line([*began]) == 6
    assert line([*began, *running[3:]]) == 4
    assert line([*began, *running[2:]]) == 2  # no user's function: the next one inwards
    assert line([*began, *running[5:]]) == 6

    def empty(file, at):
        return (file, at) == ("/me/train.py", 6)

    assert line([], empty) == line([*began, *running[6:]], empty) == 5
    assert line([*began, *running[5:]], empty) == 6  # the block is at the top level
    assert chain(stack[5:], only_calls=empty) == "/me/train.py:6"


def test_names_of_files_can_be_shortened_otherwise():
    assert of(CELL, *KERNEL, shorten=lambda file: "cell 7") == "cell 7:3"


def test_short_names():
    assert short_file("C:\\v\\Lib\\site-packages\\a\\b.py") == "a/b.py"
    assert short_file("/usr/lib/python3/dist-packages/a.py") == "a.py"
    assert short_file("model.py") == "model.py"


def test_every_package_of_the_toolkit_is_known_from_another_machine_too():
    packages = {path.parent.name for path in Path(toolkit.__file__).parent.glob("*/__init__.py")}
    assert {name for name in packages if not frames._OWN.search(f"/home/x/src/toolkit/{name}/a.py")} == set()
