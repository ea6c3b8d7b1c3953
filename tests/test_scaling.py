"""Where the time of a step goes, and what rows say of each other: the arithmetic of `benchmarks/scaling.py`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scaling
import scaling_trace
from scaling_conclusion import scaling_conclusion
from scaling_trace import Kernel


def test_communication_is_exposed_where_nothing_computes() -> None:
    kernels = [
        Kernel("gemm_bf16", 0, 10),
        Kernel("ncclDevKernel_AllGather", 5, 25),
        Kernel("elementwise", 12, 14),
        Kernel("flash_fwd", 13, 15),  # on another stream, beside it
        Kernel("ncclDevKernel_ReduceScatter", 20, 30),
        Kernel("multi_tensor_apply", 40, 50),
    ]
    found = scaling_trace.parts(kernels, 2)
    expected = {
        "computing": 23, "communication": 25, "exposed": 17, "idle": 10, "attention": 2, "matrix products": 10, "optimizer": 10,
        "other kernels": 2,
    }  # fmt: skip
    assert found == pytest.approx({kind: microseconds / 1e6 / 2 for kind, microseconds in expected.items()})


def test_only_what_runs_on_the_gpu_counts() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 4.0, "dur": 1.0},
        {"name": "process_name", "ph": "M"},
    ]
    kernels = scaling_trace.kernels_of({"traceEvents": events})
    assert kernels == [Kernel("gemm", 1, 3), Kernel("Memcpy HtoD", 4, 5)]
    assert scaling_trace.parts([], 2) == {}


def test_rows_are_compared_with_those_on_fewer_gpus_and_with_plain_fsdp() -> None:
    speed = {"note": "flux1-dev, 512 px", "parts_s": {}, "resolution": 512}
    rows = [
        {"note": "plain FSDP2, eager, 512 px", "num_gpus": 2, "images_per_s": 10.0},
        {**speed, "num_gpus": 2, "images_per_s": 15.0},
        {**speed, "num_gpus": 8, "images_per_s": 54.0},
        {"note": "a checkpoint", "num_gpus": 8, "losses": [2.0, 1.0]},
        {"note": "a checkpoint, resumed by 4", "num_gpus": 4, "saved_by": 8, "losses": [2.0, 1.001]},
        {"note": "a checkpoint, resumed by one that streams", "num_gpus": 1, "saved_by": 8, "losses": [2.0, 1.5]},
    ]
    scaling.compare(rows)
    assert [row.get("of_linear") for row in rows[:3]] == [None, 1.0, 0.9]
    assert rows[1]["ratio"] == 1.5 and "ratio" not in rows[2]
    assert [row["within_tolerance"] for row in rows[3:]] == [True, True, False]
    told = scaling_conclusion([*rows, {"note": "a worker killed", "num_gpus": 8, "median_s": 41.2}])
    assert told.startswith("Of linear scaling are kept: `flux1-dev, 512 px` 90% from 2 to 8. Images a second")
    assert "1.50 times on 2" in told and "differ by 5.0e-01 at most" in told and told.endswith("next step: 41 s on 8.")


def test_a_line_of_the_baseline_is_read() -> None:
    line = "compiled False, 16 per GPU, 512 px: first step 12.3 s, then 3.33 s, 9.60 img/s, 309 TFLOPS per GPU, 94.1 GiB"
    found = scaling.RESULT_OF_BASELINE.search(line)
    assert found is not None and found.groupdict() == {
        "size": "16", "side": "512", "first": "12.3", "step": "3.33", "rate": "9.60", "tflops": "309", "gib": "94.1"
    }  # fmt: skip
