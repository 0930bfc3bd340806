"""The golden programs on the virtual H200 do what a real H200 did: copies by direction and bytes, and waits."""

import pytest

from tests.golden import programs_more
from tests.golden.replay import compare, differences, programs

# What is known to differ, and why. A program listed here that has become right fails its test, like an unlisted one that is
# wrong. None of the first 25 may be here.
DEVIATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "generate_qwen3_static": (("d2d",), "transformers compiles a static cache's decode step on CUDA only: another program"),
    "copy_d2d_complex_conj": (("d2d",), "a conjugate is made at once here; on CUDA the copy of a lazy one is a kernel"),
    "r2_lstm": (("d2d",), "cuDNN packs a recurrent network's weights into one buffer; here its cells run one by one"),
}


@pytest.mark.parametrize("name", list(programs()))
def test_the_virtual_gpu_copies_and_waits_as_an_h200(name: str):
    if name.startswith(("hf_", "generate_")):
        pytest.importorskip("transformers", reason="an unmodified Hugging Face generate() needs transformers")
    want, got = compare(name)
    expected, reason = DEVIATIONS.get(name, ((), "no deviation is known"))
    assert differences(want, got) == expected, f"{reason}\nmeasured {want}\nreplayed {got}"
    if want.value is not None and name not in programs_more.RANDOM:
        assert got.value == (pytest.approx(want.value) if isinstance(want.value, float) else want.value)


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_deviation_is_of_a_program_that_exists(name: str):
    assert name in programs_more.PROGRAMS
