"""Lesson 5, "Memory, cell by cell": its questions. Its checks are in `memory_checks.py`."""

from __future__ import annotations

from toolkit.ui.lessons.lesson import Lesson, Question

MIB = 1 << 20
SIZES = ("a few KiB", "a few MiB", "tens of MiB")

QUESTIONS = {
    "three numbers": Question(
        hint="Three large tensors are in memory at the same time: `x`, `x.double()` and its square. How many bytes does each "
        "have? And which of them has a variable at the end?",
        why="8 MiB for x, 16 for x.double(), 16 for its square: 40. At the end x is left, and 512 bytes for `length`, which "
        "is the smallest block of the allocator.",
        answer='{"peak MiB": 8 + 16 + 16, "kept MiB": 8}',
        within=0.01,
        who="the allocator",
    ),
    "one position": Question(
        hint="The float32 logits of all positions take 32 MiB. Select the last position of `model(ids)` first, then convert.",
        why="The logits of one position are small. You can go one step further: `model.head` doesn't need the other "
        "positions either. Then the peak is below 2 MiB.",
        answer="""\
@torch.inference_mode()
def next_token_mended(ids):
    return model(ids)[:, -1].float().argmax(-1)""",
    ),
    "twelve losses": Question(
        hint="Each loss was computed with gradients enabled. What does `loss.backward()` need, if somebody calls it later?",
        why="{kept:.1f} MiB for twelve numbers: each iteration leaves something behind.",
        answer='{"kept": "tens of MiB"}',
        who="the allocator",
        choices=SIZES,
    ),
    "numbers only": Question(
        hint="The elements of the list must have no graph: use loss.item() or loss.detach(). Or prevent that a graph is "
        "created at all, with `torch.no_grad()`.",
        why="`.detach()` keeps the number without the graph; `.item()` does, too, but waits for the GPU each time (lesson 1). "
        "The best solution is `with torch.no_grad():` around the loop: then no graph is created, and the peak is lowest.",
        answer="""\
def losses_of_mended(batches):
    with torch.no_grad():
        return losses_of(batches)""",
    ),
    "release": Question(
        hint="Read the last line that `%memory hidden` printed. It is a command: write it into the cell.",
        why="Your variables are unchanged. In a script, `except Exception as e: failed.append(e)` holds tensors in the same "
        "way: keep str(e) or e.with_traceback(None) instead.",
        answer="%memory release",
    ),
    "growing": Question(
        hint="`torch.cat` copies to a new tensor. Which tensors are in memory while it copies for the last time?",
        why="While `torch.cat` copies, the old cache and the new one exist, so the peak is twice the cache.",
        answer='{"peak MiB": 2 * 4160 * token_bytes / MiB}',
        within=0.03,
        who="the allocator",
    ),
    "one place": Question(
        hint="Use torch.empty with `room` tokens in __init__, and count the written tokens as self.n. In append, let n = "
        "self.n and assign self.kv[:, :, n : n + new.shape[2]] = new. Return the part up to the new n.",
        why="The peak is the cache and one part of the prompt. Each token is copied once, and memory is not fragmented. The "
        "address of the cache stays the same, too, which a CUDA graph needs.",
        answer="""\
class MendedCache:
    def __init__(self, room):
        self.kv, self.n = torch.empty(2, 8, room, 128, dtype=torch.bfloat16, device=gpu.torch), 0

    def append(self, new):
        self.kv[:, :, self.n : self.n + new.shape[2]] = new
        self.n += new.shape[2]
        return self.kv[:, :, : self.n]""",
    ),
    "again": Question(
        hint="Which object still refers to the weights of the old network, although no variable does? And what else does that "
        "object hold?",
        why="16 MiB of new weights, and nothing was freed: the optimizer holds the old weights and its state for them, and it "
        "would go on training the old ones.",
        answer='{"MiB": 16 + 2 * 16 + 16}',
        within=0.02,
        who="the allocator",
    ),
    "old network": Question(
        hint="The optimizer was created from the parameters of the old `net`. Create it again, in the same variable.",
        why="An optimizer belongs to the parameters that it was created with. Two other objects often hold a whole model on "
        "the GPU: best = copy.deepcopy(net), and the state passed to load_state_dict(state). Keep them on the CPU.",
        answer="optimizer = torch.optim.AdamW(net.parameters())  # of the new network",
    ),
    "cards": Question(
        hint="Subtract the logits from the smallest memory above, and add the cache. Leave some room for the activations of "
        "the layers.",
        why="{last:.1f} GiB at the peak instead of {first:.1f}, despite the cache: the logits alone took most of the "
        "difference, for positions that nobody needed.",
        answer='{"GPUs": 4}',
        who="the allocator",
    ),
}

lesson = Lesson(
    "memory_cell_by_cell",
    "Memory, cell by cell",
    minutes=60,
    goals=(
        "predict the peak of a line of code, and what it keeps",
        "read an out-of-memory error, and find the tensor that is too much",
        "say who holds memory that no variable refers to, and release it",
        "tell whether a program would fit on a GPU that you don't have",
    ),
    questions=QUESTIONS,
)


def size(n_bytes: int) -> str:
    """Return which of `SIZES` a number of bytes is: below 1 MiB, below 10 MiB, or more."""
    return SIZES[(n_bytes >= MIB) + (n_bytes >= 10 * MIB)]
