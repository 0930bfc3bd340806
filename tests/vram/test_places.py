"""Tests of the lines that are quoted for allocations in scripts, in notebook cells and in tests.

In each program, "# here" marks the line where the places of its allocations start. `make` allocates 2 MiB, in this file.
"""

import gc
import runpy
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._traceback import CapturedTraceback

import toolkit as tk
from toolkit.core import callers
from toolkit.gpu.allocation_log import log
from toolkit.trace.snapshot import frames
from toolkit.vram.measure import why_out_of_memory

MAIN = """
def main():
    global m
    kept = [make()]
    with tk.memory() as m:
        kept.append(make())  # here

"""
PROGRAMS = {
    "the block is in main": f'{MAIN}if __name__ == "__main__":\n    main()\n',
    "main returns a value": f"{MAIN}status = main()\n",
    "the block is further in": f"{MAIN}def run():\n    main()\nresult = run()\n",
    "the block is at the top": "def train():\n    return make()\nwith tk.memory() as m:\n    train()  # here\n",
    "the block is in a with statement of a helper": """
def main():
    with measured():
        kept = make()  # here
main()
""",
    "a decorated function": """
@tk.memory
def train():
    return make()  # here
def main():
    global m
    kept = train()
    m = train.memory
main()
""",
    "a coroutine": """
import asyncio
async def main():
    global m
    with tk.memory() as m:
        await asyncio.sleep(0)
        kept = make()  # here
asyncio.run(main())
""",
    "the inner block of two": """
def step():
    with tk.memory():
        return make()  # here
def main():
    global m
    with tk.memory() as m:
        kept = step()
main()
""",
    "a thread of the block": """
import threading
def work():
    kept.append(make())  # here
def main():
    global m, kept
    kept = []
    with tk.memory() as m:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
main()
""",
    "blocks that are older, from main": """
def main():
    global m
    kept = make()  # here
    with tk.memory() as m:
        pass
main()
""",
    "blocks that are older, from the top": """
def build():
    return make()
kept = build()  # here
with tk.memory() as m:
    pass
""",
}


@pytest.fixture
def gpu():
    gpu = tk.device("virtual:h200")
    gc.collect()
    return gpu


class Program:
    """A script, run with `make`, and the place of its last allocation on CUDA, from a stack as CUDA's allocator records it."""

    def __init__(self, path, text):
        self.path, self.m = path, None
        self.lines = [f"{path}:{i}" for i, line in enumerate(text.splitlines(), 1) if "# here" in line]
        path.write_text(text)

    def run(self):
        names = {"make": self.make, "tk": tk, "measured": self.measured}
        return runpy.run_path(str(self.path), names, "__main__").get("m") or self.m

    def make(self):
        self.stack = CapturedTraceback.extract().tb
        self.within = log.scopes[-1].within if log.scopes else {}
        return torch.empty(2 << 20, dtype=torch.uint8, device="vgpu")

    @contextmanager
    def measured(self):
        with tk.memory() as self.m:
            yield

    def on_cuda(self):
        stack = torch._C._profiler.symbolize_tracebacks([self.stack])[0]
        kinds = frames.Kinds(callers.is_installed, callers.is_library)
        return frames.chain(stack, callers.short_path, kinds, callers.only_calls, [*self.within.values()])


def places(m):
    """Return the places of the allocations of 2 MiB."""
    return m.trace.select(m.trace.is_kind("alloc") & (m.trace["bytes"] == 2 << 20)).text("where")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_place_in_a_script_starts_where_it_says_something(gpu, tmp_path, name):
    program = Program(tmp_path / "script.py", PROGRAMS[name])
    place = places(program.run())[-1]
    assert place.partition(" > ")[0] == program.lines[-1]
    assert program.on_cuda().partition(" > ")[0] == program.lines[-1]
    assert "test_places.py" in place.partition(" > ")[2]


def test_a_place_in_a_notebook_starts_in_the_cell(gpu):
    text = """
def train():
    with tk.memory() as m:
        kept = make()
    return m
m = train()  # the cell's line
"""
    names = {"tk": tk, "make": lambda: torch.empty(2 << 20, dtype=torch.uint8, device="vgpu")}
    exec(compile(text, "/tmp/ipykernel_1/7.py", "exec"), names)
    assert places(names["m"])[-1].startswith("7.py:6 > ")


def test_a_place_in_a_test_starts_in_the_function_of_the_block(gpu):
    def train():
        with tk.memory() as m:
            kept = torch.empty(2 << 20, dtype=torch.uint8, device="vgpu")
        del kept
        return m

    (place,) = places(train())
    assert place.endswith(f"test_places.py:{train.__code__.co_firstlineno + 2}")
    assert ">" not in place


def test_out_of_memory_outside_of_any_block_quotes_the_line_of_main(gpu, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def main():\n    huge = make()\nmain()\n")
    huge = {"make": lambda: torch.empty(1 << 40, dtype=torch.uint8, device="vgpu")}
    kept = {"make": lambda: torch.empty(2 << 30, dtype=torch.uint8, device="vgpu")}
    script.with_name("kept.py").write_text("def main():\n    return make()\nheld = main()\n")
    held = runpy.run_path(str(script.with_name("kept.py")), kept, "__main__")
    script.with_name("lost.py").write_text("def main():\n    held.append(make())\nmain()\n")
    lost = runpy.run_path(str(script.with_name("lost.py")), {**kept, "held": []}, "__main__")
    with pytest.raises(torch.OutOfMemoryError) as error:
        runpy.run_path(str(script), huge, "__main__")
    assert f"{tmp_path}/kept.py:3 > " in str(error.value)
    assert f"{tmp_path}/lost.py:2 > " in str(error.value)
    assert "lost.py:3" not in str(error.value)
    why_out_of_memory(error.value, {})
    note = "".join(error.value.__notes__)
    assert f"held = main() in {tmp_path}/kept.py line 3, through " in note
    assert f"held.append(make()) in {tmp_path}/lost.py line 2, through " in note
    del held, lost


def test_a_block_keeps_no_variable_of_its_functions_alive(gpu):
    scope = tk.memory()

    def begins():
        large = torch.empty(2 << 20, dtype=torch.uint8, device="vgpu")
        scope.__enter__()
        return weakref.ref(large)

    gone = begins()
    assert gone() is None
    scope.__exit__(None, None, None)
    assert not log.within
