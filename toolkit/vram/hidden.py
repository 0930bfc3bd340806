"""Find memory that no variable of the caller holds, but tracebacks, results that a notebook keeps, and reference cycles.

`find` names it, and `release` frees it. Memory that only Python's garbage collector can free has the kind "garbage". Variables
of running functions, which called the caller or run on other threads, those of paused generators and coroutines, and open
widgets of a notebook with their callbacks are named too; `release` does not free what they hold.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from time import thread_time
from types import CellType, FrameType, FunctionType, TracebackType
from typing import Any

import torch

from toolkit.core.callers import ipython_shell
from toolkit.core.collector import no_collection
from toolkit.core.signals import signals_deferred
from toolkit.core.units import bytes_text
from toolkit.gpu import allocation_scopes
from toolkit.trace.ledger import place_text, whole
from toolkit.vram import owners
from toolkit.vram.cycles import garbage
from toolkit.vram.frames import is_of_pytest, of_frame, of_test, of_traceback
from toolkit.vram.owners import Holder, Limit, Place
from toolkit.vram.parts import LEAF_TYPES, PAUSED, is_users

GARBAGE = "garbage"
_LEAST = 1 << 20  # bytes without an owner below which no more are searched for, because a search takes 0.1 s and more
_REST_S = 0.1  # seconds of processor time for the rest of large containers, if all large memory has an owner without it
_MOST_S = 2.0  # seconds of processor time of a search
_LEAST_LOOKED_AT = 4_000_000  # objects of a search in any case: a virtual machine may stand still, and this time passes
_AT_ONCE = 16  # tensors of one search
_KERNEL = ("/IPython/", "/ipykernel/")  # callers of a notebook's code, which lead to all of its variables
_RUNNING = re.compile(r"[\w.]+ in [^()]*\(\)( \(thread '[^']*'\))?(?! \(the traceback of)")
_OPEN = "an open "  # begins the name of a widget
_DISPATCHER = "CallbackDispatcher"  # of ipywidgets
_NEWEST = 500  # callbacks and attributes of widgets
_FOR_FRONT_END = ("comm", "keys", "_states_to_send", "_property_lock", "_cross_validation_lock", "children")
_PLAIN = (dict, list, tuple, set, frozenset)

Found = dict[Place, Holder]


def find(
    variables: Mapping[str, Any], shell: Any | None = None, error: BaseException | None = None, limit: Limit | None = None
) -> tuple[Found, Found]:
    """Return the owners of memory that can be reached from `variables` or from the user's modules, and those of other memory.

    `error` is an error that is being handled, if any. Modules, running functions, widgets and reference cycles are searched
    only if much memory has no owner without them, and large containers only then to their end. Of reference cycles, only the
    memory of GPUs is included. Afterwards, `limit.reached` says whether much memory has no owner because a walk ended early.
    """
    limit = limit or Limit()
    quick = Limit(_REST_S)
    visible = owners.find(variables, quick)
    held = owners.walk(_of_errors(error)) | results(shell)
    if quick.reached and _unnamed(visible | held):
        visible = owners.find(variables, limit)
    walked = {id(value) for value in variables.values()}

    def walk(roots: Iterable[tuple[str, Any]]) -> Found:
        return owners.walk((root for root in roots if id(root[1]) not in walked), limit)

    if _unnamed(visible | held):
        # A search ends after some number of values: those of this thread must not keep it from those of others.
        held = walk(_of_threads(others=True)) | walk(_of_threads(others=False)) | held
    if _unnamed(visible | held):
        visible |= {place: holder for place, holder in walk(owners.of_modules()).items() if place not in visible | held}
    if _unnamed(visible | held):
        roots = list(_of_widgets())  # a search looks at each of them before it follows any: the newest have one of their own
        held = walk(roots[_NEWEST:]) | walk(roots[:_NEWEST]) | held
    if _unnamed(visible | held):
        held |= _garbage(visible | held)
    if _unnamed(visible | held):
        held = walk(_of_paused()) | held
    limit.reached = limit.reached and _unnamed(visible | held)
    return visible, {place: holder for place, holder in held.items() if place not in visible}


@dataclass(frozen=True)
class Hidden:
    """Memory on a GPU that no variable holds: its bytes, its owner, and the line that allocated it, if that was recorded.

    `stays`: it is held by a running function or an open widget, so that `release` does not free it.
    """

    bytes: int
    owner: str
    where: str | None
    stays: bool = False

    def __str__(self) -> str:
        return f"{bytes_text(self.bytes):>9}  {self.owner}{f', allocated in {self.where}' if self.where else ''}"


def listed(variables: Mapping[str, Any], shell: Any | None = None) -> list[Hidden]:
    """Return the memory on GPUs that can't be reached from `variables`, the largest first.

    Elements of one list, and what their graphs hold, are one entry per line of code that allocated them.
    """
    with no_collection():  # a collection would free what the trace still has
        with signals_deferred:  # an interrupt between the two would leave the scope open
            trace = allocation_scopes.end(allocation_scopes.begin())
        held = find(variables, shell)[1]
    rows = trace.is_kind("alloc").nonzero()[0]
    lines = dict(zip(trace["address"][rows].tolist(), trace.select(rows).text("where"), strict=True))
    alike: dict[tuple[str, str | None], list[Holder]] = {}
    for (kind, address), holder in held.items():
        if kind != "cpu":
            place = lines.get(address)
            where = place_text(place, {}) if place else None
            alike.setdefault((whole(holder.owner), where), []).append(holder)
    found = []
    for (name, where), holders in alike.items():
        owner = holders[0].owner if len(holders) == 1 else f"{name}, {len(holders)} blocks"
        found.append(Hidden(sum(one.bytes for one in holders), owner, where, stays=bool(running(owner)) or of_widget(owner)))
    return sorted(found, key=lambda held: -held.bytes)


def releasable() -> tuple[str, list[Hidden]]:
    """Return what frees memory that no variable holds, and this memory, the largest first.

    In a notebook, `%memory release` does. Elsewhere `gc.collect()` does, and only garbage is returned.
    """
    shell = ipython_shell()
    if shell is not None:
        return "%memory release", [held for held in listed(user_variables(shell), shell) if not held.stays]
    found = listed(vars(sys.modules["__main__"]))
    return "gc.collect()", [held for held in found if held.owner.startswith(f"{GARBAGE}: ")]


def user_variables(shell: Any) -> dict[str, Any]:
    """Return the variables that the user of a notebook created, without IPython's own variables and its kept results."""
    return {name: value for name, value in owners.users(shell.user_ns).items() if name not in shell.user_ns_hidden}


def of_error(error: BaseException | None) -> dict[Place, Holder]:
    """Return the owner of memory that the traceback of an error, and of its causes, holds."""
    return owners.walk(of_traceback(error))


def running(owner: str) -> str:
    """Return the variable of a running function that `owner` is or begins with, such as "x in f() (thread 'name')", or ""."""
    found = _RUNNING.match(owner)
    return found[0] if found else ""


def of_widget(owner: str) -> bool:
    """Return whether `owner` is an open widget, or its callback."""
    return owner.startswith((_OPEN, f"callback of {_OPEN}"))


def except_for(found: Iterable[Hidden]) -> str:
    """Return what `release` does not free of memory that was found, as the end of a sentence on what it frees."""
    stay = [held.owner for held in found if held.stays]
    widgets = any(of_widget(owner) for owner in stay)
    functions = any(not of_widget(owner) for owner in stay)
    who = ["running functions"] * functions + ["open widgets"] * widgets
    return f", but not what {' and '.join(who)} hold{' (widget.close() does)' if widgets else ''}" if who else ""


def _of_threads(others: bool) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the functions that run on this thread or on all others, up to the frames of the notebook's kernel.

    The frames of pytest end them as well, because they lead to all tests of the run. Fixtures of the test are included.

    Other threads that a debugger or profiler watches are left out: before Python 3.13, their variables can't be read without
    risk while its callback runs, since Python then moves them from the frame to a dictionary and back.
    """
    names = {thread.ident: f" (thread '{thread.name}')" for thread in threading.enumerate()}
    here = threading.get_ident()
    frames = {i: top for i, top in sys._current_frames().items() if i != here} if others else {here: sys._getframe(1)}
    for ident in list(frames):
        frame: FrameType | None = frames.pop(ident)
        if ident != here and sys.version_info < (3, 13) and _watched(frame):
            continue
        thread = "" if ident == here else names.get(ident, "")
        while frame is not None and not any(kernel in frame.f_code.co_filename.replace("\\", "/") for kernel in _KERNEL):
            by_pytest = is_of_pytest(frame)
            yield from ((name + thread, value) for name, value in (of_test(frame) if by_pytest else of_frame(frame)))
            if by_pytest:
                break
            frame = frame.f_back


def _of_paused() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's paused generators and coroutines: maybe only a loop that runs holds them."""
    for value in gc.get_objects():
        frame: FrameType | None = getattr(value, PAUSED[type(value)]) if type(value) in PAUSED else None
        if frame is not None and frame.f_back is None and is_users(frame.f_globals.get("__name__", "")):
            # a fixture's request leads to all tests
            yield from ((name, held) for name, held in of_frame(frame) if type(held).__module__ != "_pytest.fixtures")


def _of_widgets() -> Iterator[tuple[str, Any]]:
    """Yield the callbacks and attributes of a notebook's open widgets with their names, those of the newest widgets first.

    Other widgets, and what each widget has for its front end, are left out, since a search ends after some thousand values.
    """
    opened = list(getattr(sys.modules.get("ipywidgets.widgets.widget"), "_instances", {}).values())[::-1]
    values = {id(widget): getattr(widget, "_trait_values", {}) for widget in opened}
    parents = {id(child): widget for widget in opened for child in values[id(widget)].get("children") or ()}
    names = {}
    for widget in opened:
        top, text = widget, values[id(widget)].get("description")
        for _ in range(20):  # boxes in boxes
            top = parents.get(id(top), top)
        within = "" if top is widget else f" (in a {type(top).__name__})"
        names[id(widget)] = f"{_OPEN}{type(widget).__name__}{f' {text!r}' if text and type(text) is str else ''}{within}"
    for widget in opened:
        own = vars(widget)
        dispatchers = [list(getattr(value, "callbacks", ())) for value in own.values() if type(value).__name__ == _DISPATCHER]
        observers = [each for kinds in own.get("_trait_notifiers", {}).values() for each in kinds.values()]
        for callback in (one for some in (*dispatchers, *observers) for one in some):
            if id(getattr(callback, "__self__", None)) not in names:  # a method of a widget leads to that widget
                yield f"callback of {names[id(widget)]}", callback
        for name, value in {**own, **values[id(widget)]}.items():
            plumbing = name.startswith("_trait") or name in _FOR_FRONT_END or type(value).__name__ == _DISPATCHER
            if not plumbing and type(value) not in LEAF_TYPES and id(value) not in names:
                yield f"{names[id(widget)]}.{name}", value


def _watched(frame: FrameType | None) -> bool:
    """Return whether a debugger or profiler may be called by the functions of this frame's thread."""
    if threading.gettrace() is not None or threading.getprofile() is not None:
        return True
    while frame is not None:
        if frame.f_trace is not None:
            return True
        frame = frame.f_back
    return False


def release(shell: Any | None = None) -> int:
    """Release the last error's traceback, a notebook's kept results (`Out`, `_`), and reference cycles, but no variable.

    Returns the number of bytes that this freed on the GPU in use.
    """
    gpu = allocation_scopes.in_use()
    before = gpu.memory().allocated_bytes if gpu is not None else 0
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    if shell is not None:
        for names in (shell.user_ns, shell.user_ns_hidden):
            for name in list(names):  # a copy: the Lab releases in its own thread, while a cell may run
                if type(name) is str and re.fullmatch(r"_+|_[0-9]+", name):
                    names.pop(name, None)
        shell.user_ns.get("_oh", {}).clear()
        shell.displayhook._ = shell.displayhook.__ = shell.displayhook.___ = ""
        shell.last_execution_result = None
        shell.InteractiveTB.tb = None
    gc.collect()
    return max(before - gpu.memory().allocated_bytes, 0) if gpu is not None else 0


def _of_errors(error: BaseException | None) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the frames in the tracebacks of `error` and of the last error that nothing handled."""
    yield from of_traceback(error)
    yield from of_traceback(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


def results(shell: Any | None) -> dict[Place, Holder]:
    """Return the owner of memory that a notebook keeps as results of cells."""
    if shell is None:
        return {}
    names = shell.user_ns
    kept = {f"Out[{number}]": value for number, value in list(names.get("Out", {}).items())}
    return owners.walk([*kept.items(), *((name, names.get(name)) for name in ("_", "__", "___"))])


# ---- reference cycles

_one_at_a_time = threading.RLock()  # the lists of another search would count as references to the garbage


def _garbage(known: Mapping[Place, Holder]) -> dict[Place, Holder]:
    """Return the owner of memory on GPUs that only the garbage collector can free. `known` is the memory found before."""
    found: dict[Place, Holder] = {}
    alive = set(known)
    with _one_at_a_time, no_collection():
        over, places = _limit(), _tensors()
        while not over():
            places = {i: place for i, place in places.items() if place not in alive and place not in found}
            some = set(list(places)[:_AT_ONCE])
            if not some:
                break
            dead, living = garbage([value for value in gc.get_objects() if id(value) in some], over)
            alive |= owners.walk(("", one) for one in living).keys()
            found |= _owners_in(dead, {places[i] for i in some} - alive)
            places = {i: place for i, place in places.items() if i not in some}
            del dead, living
    only = {place: held for place, held in found.items() if place not in alive}
    return {place: Holder(f"garbage: {held.owner}", GARBAGE, held.bytes) for place, held in only.items()}


def _limit() -> Callable[[], bool]:
    """Return a function to be called before each look at all objects: it says whether the search has taken too long."""
    ends_s, looks, least = thread_time() + _MOST_S, count(), _LEAST_LOOKED_AT // (len(gc.get_objects()) + 1)
    return lambda: next(looks) >= least and thread_time() > ends_s


def _unnamed(known: Mapping[Place, Holder]) -> bool:
    """Return whether a search is worthwhile: whether the memory in `known` is much less than what is allocated on the GPU."""
    return _allocated() - sum(holder.bytes for place, holder in known.items() if place[0] != "cpu") >= _LEAST


def _allocated() -> int:
    """Return the bytes allocated on the GPU in use; on CUDA, on all GPUs."""
    gpu = allocation_scopes.in_use()
    if gpu is not None and gpu.torch.type == "cuda":
        return sum(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))
    return gpu.memory().allocated_bytes if gpu is not None else 0


def _tensors() -> dict[int, Place]:
    """Return the places of all tensors on GPUs by id: those with graphs first, then the largest ones."""
    kinds = {torch.Tensor}
    new = [torch.Tensor]
    while new:
        new = [kind for kind in type.__subclasses__(new.pop()) if kind not in kinds] + new
        kinds.update(new)
    tensors = [value for value in gc.get_objects() if type(value) in kinds]
    placed = [(tensor, owners.memory_of(tensor)) for tensor in tensors]
    rows = [
        (tensor.grad_fn is None, -sum(n_bytes for _, _, n_bytes in memory), id(tensor), memory[-1][1])
        for tensor, memory in placed
        if memory and memory[-1][1][0] != "cpu"
    ]
    return {i: place for _, _, i, place in sorted(rows)}


def _owners_in(objects: list[Any], wanted: set[Place]) -> dict[Place, Holder]:
    """Return the owners of memory among garbage, named until all of `wanted` is: by functions, instances, then containers."""
    found: dict[Place, Holder] = {}
    for roots in _named(objects):
        if wanted <= found.keys():
            break
        found = owners.walk(roots) | found
    return found


def _named(objects: list[Any]) -> Iterator[list[tuple[str, Any]]]:
    """Yield the names of garbage to start from: the best first, and among equals the farthest from the tensors."""
    errors = [one for one in objects if isinstance(one, BaseException)]
    yield [pair for error in errors for pair in of_traceback(error)]
    yield [pair for one in objects if isinstance(one, FrameType) for pair in of_frame(one)]
    rest = [one for one in reversed(objects) if not isinstance(one, BaseException | FrameType | TracebackType | CellType)]
    rest.sort(key=lambda one: (isinstance(one, torch.Tensor), type(one) in _PLAIN, isinstance(one, FunctionType)))
    for one in rest:
        yield [(one.__qualname__ if isinstance(one, FunctionType) else type(one).__name__, one)]
