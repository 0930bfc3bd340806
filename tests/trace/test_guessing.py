"""Tests of guessing the steps of a recording without step markers, and of marking them as guessed."""

from toolkit.trace.assemble import with_guessed_steps
from toolkit.trace.events import TraceBuilder


def decode_loop(steps_from=None):
    """Three steps of two kernels and one D2H copy each, after a prefill of four kernels; the host waits for each copy."""
    builder, now = TraceBuilder(), 0
    for name in ("embed", "up", "down", "sample"):
        builder.add("kernel", now, 5, name=name, stream=0)
        now += 10
    for _ in range(6):
        builder.add("alloc", now - 1, bytes=512)
        for name in ("layer", "sample"):
            builder.add("kernel", now, 5, name=name, stream=0)
            now += 10
        builder.add("sync", now - 2, 8)
        builder.add("d2h", now, 5, bytes=8, name="copy", stream=0)
        now += 10
    return builder.build({"steps_from": steps_from})


def test_a_recording_without_steps_gets_them_guessed_waits_included():
    trace = with_guessed_steps(decode_loop())
    assert trace.meta["steps_from"] == "guessed"
    table = trace.copies().set_index("step")
    assert table.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert table["d2h_count"].tolist() == [1] * 6
    assert table["kernels"].tolist() == [6, 2, 2, 2, 2, 2]
    assert (table["host_wait_us"] == 0.008).all()


def test_steps_that_are_known_stay_and_no_pattern_is_no_step():
    known = decode_loop(steps_from="marks")
    assert with_guessed_steps(known) is known
    builder = TraceBuilder()
    for i, name in enumerate("abcdefg"):
        builder.add("kernel", i, 1, name=name)
    lone = builder.build({"steps_from": None})
    assert with_guessed_steps(lone) is lone
    empty = TraceBuilder().build({})
    assert with_guessed_steps(empty) is empty
