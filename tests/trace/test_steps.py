"""Tests of assigning events to steps, by ranges or by repeating patterns."""

import numpy as np
import pytest

from toolkit.trace.steps import Range, guess_steps, innermost, shown_name, steps_among, steps_from_ranges

# ---- ranges


def test_innermost_of_nested_ranges():
    starts, ends = [0, 2, 3, 20], [10, 8, 5, 30]
    times = [-1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 15, 20, 29, 30, 99]
    assert innermost(times, starts, ends).tolist() == [-1, 0, 0, 1, 2, 2, 1, 1, 0, 0, -1, -1, 3, 3, -1, -1]


def test_innermost_equals_a_plain_search():
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 60):
        bounds = np.sort(rng.choice(10_000, 2 * n, replace=False)) if n else np.empty(0, np.int64)
        stack, starts, ends, opened = [], [], [], 0
        for at in bounds.tolist():  # a random nesting
            if stack and (opened == n or rng.random() < 0.5):
                ends[stack.pop()] = at
            else:
                stack.append(len(starts))
                starts.append(at)
                ends.append(0)
                opened += 1
        times = rng.integers(-5, 10_005, 300)
        inside = [max((i for i in range(n) if starts[i] <= t < ends[i]), key=lambda i: starts[i], default=-1) for t in times]
        assert innermost(times, starts, ends).tolist() == inside


def test_overlapping_ranges_belong_to_the_later_one():
    assert innermost([1, 6, 12, 16], [0, 5], [10, 15]).tolist() == [0, 1, 1, -1]


def test_ranges_end_with_their_last_nanosecond():
    assert steps_from_ranges([9, 10, 11], [0], [10], [4]).tolist() == [4, 4, -1]
    assert steps_from_ranges([], [0], [10], [4]).tolist() == []
    assert steps_from_ranges([3], [], [], []).tolist() == [-1]


def named(*names, length=5, gap=10):
    return [Range(gap * i, gap * i + length, name) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "source", "steps"),
    [
        (["toolkit.step 0 prefill", "x", "toolkit.step 1 decode"], "marks", [0, -1, 1]),
        (["ProfilerStep#7", "ProfilerStep#8", "toolkit.step 1 decode"], "marks", [-1, -1, 1]),
        (["ProfilerStep#7", "step 1", "step 2", "step 3"], "ProfilerStep", [7, -1, -1, -1]),
        (["load", "step 4", "step 5", "step 6"], "ranges", [-1, 4, 5, 6]),
        (["load", "decode", "decode", "decode"], "ranges", [-1, 0, 1, 2]),
        (["decode", "decode"], None, [-1, -1]),
        (["layer 0", "layer 1", "layer 0", "layer 1"], None, [-1] * 4),
        (["step 4 of 10", "step 5 of 10", "step 6 of 10"], "ranges", [4, 5, 6]),
        (["forward fp16"] * 3, "ranges", [0, 1, 2]),
        (["aten::mm, seq = 1", "aten::mm, seq = 2", "aten::mm, seq = 3"], None, [-1] * 3),
        ([], None, []),
    ],
    ids=["own", "own-first", "profiler", "numbered", "repeated", "too-few", "layers", "of-all", "equal", "operations", "none"],
)
def test_which_ranges_are_steps(names, source, steps):
    assert steps_among(named(*names)) == (source, steps)


@pytest.mark.parametrize(
    "name",
    [
        "DistributedDataParallel.forward", "FullyShardedDataParallel._pre_forward", "DataParallel.forward",
        "Optimizer.step#SGD.step", "Optimizer.zero_grad#AdamW.zero_grad", "nccl:all_reduce", "gloo:broadcast",
        "ncclAllReduce", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    ],
)  # fmt: skip
def test_ranges_of_pytorch_are_parts_of_a_step(name):
    assert steps_among(named(*[name] * 4)) == (None, [-1] * 4)
    ranges = [*named(*[name] * 4, length=8), *named("epoch", "epoch", "epoch", length=2)]
    assert steps_among(ranges) == ("ranges", [-1] * 4 + [0, 1, 2])


def test_the_outer_of_two_repeated_ranges_is_the_step():
    ranges = [Range(100 * i, 100 * i + 90, "token") for i in range(4)]
    ranges += [Range(100 * i + 10, 100 * i + 20, "forward") for i in range(4)]
    assert steps_among(ranges) == ("ranges", [0, 1, 2, 3, -1, -1, -1, -1])


def test_the_toolkits_own_ranges_are_shown_by_their_name():
    assert [shown_name(name) for name in ("toolkit.step 12 decode", "ProfilerStep#3")] == ["decode", "ProfilerStep#3"]


# ---- guessing


def decode(steps, layers=8, prefill=50, readback=True, extra_every=0, seed=0):
    """Return kernel codes of a decode run (embed 1, `layers` of 2..9, head 20, argmax 21, D2H copy 30) and the true steps."""
    rng = np.random.default_rng(seed)
    codes, truth = rng.integers(40, 60, prefill).tolist(), [0] * prefill
    for step in range(steps):
        one = [1] + [code for _ in range(layers) for code in range(2, 10)] + [20, 21]
        if extra_every and step % extra_every == 0:
            one.insert(5, 33)  # occasionally one extra kernel
        one += [30] if readback else []
        codes += one
        truth += [step + (0 if readback or not prefill else 1)] * len(one)
    codes = np.array(codes)
    return codes, codes == 30, np.array(truth)


@pytest.mark.parametrize("layers", [1, 2, 36])
@pytest.mark.parametrize("extra_every", [0, 3, 16])
def test_a_read_back_a_step_ends_the_steps(layers, extra_every):
    codes, readback, truth = decode(40, layers=layers, extra_every=extra_every)
    np.testing.assert_array_equal(guess_steps(codes, readback), truth)


@pytest.mark.parametrize("layers", [4, 36])
@pytest.mark.parametrize("prefill", [0, 50])
def test_without_a_read_back_what_recurs_once_a_step_begins_it(layers, prefill):
    codes, readback, truth = decode(40, layers=layers, prefill=prefill, readback=False)
    np.testing.assert_array_equal(guess_steps(codes, readback), truth)


def test_a_kernel_that_comes_every_sixteenth_step_does_not_mislead():
    codes, readback, truth = decode(64, readback=False, extra_every=16)
    np.testing.assert_array_equal(guess_steps(codes, readback), truth)


def test_what_follows_the_last_read_back_is_in_no_step():
    codes, readback, truth = decode(10)
    more = np.concatenate([codes, [70, 71]]), np.append(readback, [False, False])
    np.testing.assert_array_equal(guess_steps(*more), np.append(truth, [-1, -1]))


ONE, CHECK = [*range(1, 25), 30], [60, 61, 30]  # a step, and another that reads as many bytes back


def guessed(*parts):
    """Return the guessed step of each part (or those of its events, if they differ). Code 30 is a copy to the host."""
    codes = np.concatenate(parts)
    steps = np.split(guess_steps(codes, codes == 30), np.cumsum([len(part) for part in parts])[:-1])
    return [found[0] if len(set(found.tolist())) == 1 else found.tolist() for found in steps]


@pytest.mark.parametrize("checks", [1, 2, 5])
@pytest.mark.parametrize("steps", [4, 6, 40])
@pytest.mark.parametrize("prefill", [ONE, [*ONE[:8], 70, *ONE[8:]], ONE[:-3] * 2 + ONE], ids=["alike", "similar", "long"])
def test_read_backs_during_set_up_and_the_prefill_are_in_step_0(checks, steps, prefill):
    assert guessed(*[CHECK] * checks, prefill, *[ONE] * steps) == [0] * (checks + 1) + list(range(1, steps + 1))


@pytest.mark.parametrize("steps", [4, 40])
def test_the_last_of_two_read_backs_of_a_step_ends_it(steps):
    begin, decode = [80, 81, 30], [step for step in range(1, steps + 1) for _ in range(2)]
    assert guessed(CHECK, begin, ONE, *[begin, ONE] * steps) == [0, 0, 0, *decode]
    chunk = begin + ONE[:-4]  # of a prefill in two chunks
    assert guessed(CHECK, chunk, begin, ONE, *[begin, ONE] * steps) == [0, 0, 0, 0, *decode]


def test_a_prefill_that_samples_in_another_way_stays_a_step():
    prefill = [*ONE[:-2], 70, 30]
    assert guessed(prefill, *[ONE] * 10) == list(range(11))
    assert guessed(CHECK, CHECK, prefill, *[ONE] * 10) == [0, 0, *range(11)]


def test_read_backs_after_the_last_step_are_in_no_step():
    assert guessed(ONE, *[ONE] * 10, CHECK, CHECK) == [*range(11), -1, -1]


def test_a_loop_that_reads_back_in_several_ways_keeps_its_steps():
    other = [*ONE[:-2], 70, 30]
    assert guessed(*[ONE, other] * 6) == list(range(12))
    assert guessed(*[other] * 2, *[ONE] * 8, *[other] * 2) == list(range(12))


@pytest.mark.parametrize(
    "codes",
    [[], [1], [1, 1], np.arange(100), np.zeros(100, int), np.random.default_rng(1).integers(0, 80, 300)],
    ids=["empty", "one", "two", "all-different", "all-same", "random"],
)
def test_no_pattern_is_no_guess(codes):
    assert guess_steps(codes, np.zeros(len(codes), bool)) is None


def test_a_million_events_are_guessed_in_seconds():
    codes, readback, truth = decode(1500, layers=80)
    np.testing.assert_array_equal(guess_steps(codes, readback), truth)
