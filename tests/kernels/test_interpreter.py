"""Triton's interpreter, as the tests make it faster: types are worked out once, and what they are stays the same."""

import numpy as np
import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
tl = interpreter.tl


def test_types_are_worked_out_once():
    one, other = (tl.core.block_type(tl.float32, [tl.constexpr(2), 4]) for _ in range(2))
    assert one.shape is other.shape
    assert one == other
    assert (list(one.shape), one.numel, one.name) == ([2, 4], 8, str(other))
    of_ints = one.with_element_ty(tl.int32)
    assert (of_ints.scalar, list(of_ints.shape)) == (tl.int32, [2, 4])
    assert of_ints != one
    with pytest.raises(ValueError, match="must be a power of 2"):
        tl.core.block_type(tl.float32, [2, 3])
    with pytest.raises(AssertionError):
        tl.core.block_type(tl.float32, (2, 4))  # not a list, although the sizes are known


def test_tensors_have_the_shape_of_their_type():
    block = tl.core.block_type(tl.bfloat16, [2, 4])
    for type, want in ((block, [2, 4]), (tl.bfloat16, []), (block, [2, 4])):
        made = tl.core.tensor("handle", type)
        assert (made.handle, made.type, made.dtype) == ("handle", type, tl.bfloat16)
        assert ([size.value for size in made.shape], made.numel.value) == (want, 8 if want else 1)


def test_dtypes_for_numpy():
    pointer = tl.pointer_type(tl.int8)
    for type, want in ((tl.int8, np.int8), (pointer, np.uint64), (tl.bfloat16, np.uint16), (tl.int1, np.bool_)):
        for each in (type, tl.core.block_type(type, [4])):
            assert interpreter._get_np_dtype(each) == want, each


def test_blocks_of_one_shape_are_not_broadcast():
    def made(type, shape):
        handle = interpreter.TensorHandle(np.zeros(shape, np.int32), tl.int32)
        return tl.core.tensor(handle, tl.core.block_type(type, shape) if shape else type)

    find = interpreter.interpreter_semantic.broadcast_impl_value
    one, other, column, number = made(tl.int32, [2, 4]), made(tl.int32, [2, 4]), made(tl.int32, [2, 1]), made(tl.int32, [])
    assert find(one, other) == (one, other)
    for left, right in ((one, column), (column, one), (one, number), (number, one)):
        assert [list(each.type.shape) for each in find(left, right)] == [[2, 4]] * 2
    with pytest.raises(ValueError, match="incompatible dimensions"):
        find(one, made(tl.int32, [4, 4]))
