"""Tests of collectives in the traces of other tools: kernel names, PyTorch's arguments, peer copies, Nsight Systems."""

from __future__ import annotations

import numpy as np
import pytest

import toolkit as tk
from tests.trace.rank_files import collective, plain, write_rank
from tests.trace.test_nsys import Database
from toolkit.trace.columns import KINDS
from toolkit.trace.nccl import of_kernel


@pytest.mark.parametrize(
    ("name", "operation", "algorithm"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce", "ring, LL"),
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL128(ncclDevKernelArgsStorage<4096ul>)", "all_reduce", "tree, LL128"),
        ("ncclDevKernel_AllReduce_Sum_bf16_NVLS_TREE_SIMPLE(ncclDevKernelArgs4K)", "all_reduce", "nvls tree, SIMPLE"),
        ("ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce", "ring, LL"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter", "ring, LL"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather", "ring, LL"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast", "ring, LL"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send and recv", None),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", None, None),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)", "all_reduce", "symmetric"),
        ("void c10d::symmetric_memory::(anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(...)",
         "all_reduce", "one-shot"),
        ("void c10d::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(unsigned long)", "all_reduce", "two-shot"),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", "all_reduce", "multimem"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)", "all_reduce", "one-shot"),
    ],
)  # fmt: skip
def test_names_of_kernels(name, operation, algorithm):
    found = of_kernel(name)
    assert (found.operation, found.algorithm) == (operation, algorithm)


@pytest.mark.parametrize(
    "name",
    [
        "gemm", "void at::native::reduce_kernel<512, 1, all_reduce_policy>(at::native::ReduceOp)", "triton_red_fused_sum_0", "",
        "triton_poi_fused_all_reduce_0", "triton_red_fused_add_all_gather_into_tensor_relu_3",
    ],
)  # fmt: skip
def test_other_kernels_are_not_collectives(name):
    assert of_kernel(name) is None


def test_arguments_of_pytorch(tmp_path):
    gathered = {"Collective name": "_allgather_base", "In msg nelems": 8, "Out msg nelems": 16, "dtype": "Float", "Seq": 4}
    sent = {"Collective name": "send", "Dst Rank": 1, "In msg nelems": 3, "Out msg nelems": 0, "dtype": "Long"}
    events = [
        plain(0, 5), collective(10, 4, seq=3), collective(20, 4, name="ncclDevKernel_AllGather_RING_LL()", **gathered),
        collective(30, 4, name="ncclDevKernel_SendRecv()", **sent),
    ]  # fmt: skip
    trace = tk.open_trace(write_rank(tmp_path / "a.json", 3, 4, events))
    assert [KINDS[kind] for kind in trace["kind"]] == ["kernel", "collective", "collective", "p2p"]
    assert trace.text("operation") == [None, "all_reduce", "all_gather", "send"]
    assert trace.text("algorithm") == [None, "ring, LL", "ring, LL", None]
    assert trace.text("group") == [None, "0", "0", "0"]
    assert trace["bytes"].tolist() == [0, 5376 * 2, 16 * 4, 3 * 8]
    assert trace["seq"].tolist() == [-1, 3, 4, -1]
    assert trace["peer"].tolist() == [-1, -1, -1, 1]
    assert set(trace["rank"].tolist()) == {3}
    assert (trace.meta["rank"], trace.meta["world_size"], trace.meta["groups"]) == (3, 4, {"0": [0, 1, 2, 3]})


def test_kernels_without_arguments_get_those_of_the_call_that_launched_them(tmp_path):
    bare = collective(10, 4)
    said = bare["args"] | {"External id": 7, "Seq": 11}
    bare["args"] = {"device": 0, "stream": 7, "External id": 7}
    call = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": 9, "dur": 1, "args": said}
    trace = tk.open_trace(write_rank(tmp_path / "a.json", 0, 2, [bare, call]))
    assert trace.text("group") == ["0"]
    assert (trace["bytes"].tolist(), trace["seq"].tolist(), trace["group_size"].tolist()) == ([10752], [11], [2])


@pytest.mark.parametrize("args", [{"Seq": 1 << 80}, {"dtype": 5}, {"In msg nelems": -2, "Out msg nelems": -2}])
def test_arguments_of_other_types_beside_the_kernels_leave_those_alone(tmp_path, args):
    bare, said = collective(10, 4), collective(10, 4)["args"] | {"External id": 7} | args
    bare["args"] = {"device": 0, "stream": 7, "External id": 7}
    call = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": 9, "dur": 1, "args": said}
    with pytest.warns(UserWarning, match="1 event has unexpected fields and is left out"):
        trace = tk.open_trace(write_rank(tmp_path / "a.json", 0, 2, [bare, call]))
    assert (trace.text("operation"), trace["bytes"].tolist()) == (["all_reduce"], [0])


def test_collectives_without_numbers_are_numbered_in_their_group(tmp_path):
    events = [collective(10 * i, 4, seq=None, **{"Process Group Name": "ab"[i % 2]}) for i in range(5)]
    trace = tk.open_trace(write_rank(tmp_path / "a.json", 0, 2, events))
    assert list(zip(trace.text("group"), trace["seq"].tolist(), strict=True)) == [
        ("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2),
    ]  # fmt: skip


def test_peer_copies_name_the_gpu_at_the_other_end(tmp_path):
    args = {"fromDevice": 0, "inDevice": 0, "toDevice": 2, "stream": 7, "bytes": 64}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "pid": 0, "tid": 7, "ts": 1, "dur": 2}
    trace = tk.open_trace(write_rank(tmp_path / "a.json", 0, 1, [copy | {"args": args}]))
    assert (trace["peer"].tolist(), trace["bytes"].tolist()) == ([2], [64])


@pytest.mark.parametrize(
    "args", [{"Group size": "x"}, {"In msg nelems": [1]}, {"Process Group Name": 5}, {"dtype": {}}, {"Seq": 1 << 80}]
)
def test_arguments_of_odd_types_are_counted_as_unreadable(tmp_path, args):
    with pytest.warns(UserWarning, match="1 event has unexpected fields and is left out"):
        trace = tk.open_trace(write_rank(tmp_path / "a.json", 0, 2, [collective(1, 2, **args), plain(5, 1)]))
    assert trace.meta["unreadable_events"] == 1
    assert trace.text("name") == ["gemm"]


@pytest.mark.parametrize(
    "info", [3, {"rank": -1}, {"rank": 1 << 40}, {"pg_config": {"x": 1}}, {"pg_config": [{"ranks": "all"}]}]
)
def test_headers_of_odd_types_say_nothing(tmp_path, info):
    head = {"schemaVersion": 1, "distributedInfo": info}
    trace = tk.open_trace(write_rank(tmp_path / "a.json", 0, 2, [plain(5, 1)], head))
    assert not {"rank", "world_size", "groups"} & set(trace.meta)


def test_collectives_and_peer_copies_of_nsight(tmp_path):
    made = Database(tmp_path / "a.sqlite")
    made.put(
        "StringIds", id=900, value="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
    )
    times = {"deviceId": 0, "streamId": 7, "correlationId": 99}
    made.put("CUPTI_ACTIVITY_KIND_KERNEL", start=10, end=20, demangledName=900, shortName=900, **times)
    made.put(
        "CUPTI_ACTIVITY_KIND_MEMCPY", start=30, end=40, bytes=64, copyKind=10, srcKind=2, dstKind=2, srcDeviceId=0,
        dstDeviceId=1, **times,
    )  # fmt: skip
    trace = made.trace()
    assert [KINDS[kind] for kind in trace["kind"]] == ["collective", "p2p"]
    assert trace.text("algorithm") == ["ring, LL", None]
    np.testing.assert_array_equal(trace["peer"], [-1, 1])
