"""The fused addition to an fp32 sum against PyTorch's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fluxray.engine.accumulate import add_to_sum, begin_sum
from tests.engine import accumulate_cases


def test_a_sum_in_fp32_keeps_what_bf16_would_lose() -> None:
    total = torch.empty(3)
    begin_sum(total, torch.full((3,), 256.0, dtype=torch.bfloat16))
    for _ in range(4):
        add_to_sum(total, torch.full((3,), 0.25, dtype=torch.bfloat16))
    assert total.tolist() == [257.0] * 3


def test_the_kernel_gives_the_bits_of_the_plain_sum_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", accumulate_cases.__name__],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("capability", [86, 90])
def test_compiles_without_a_gpu(capability: int, begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from fluxray.engine import accumulate_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"total": "*fp32", "gradient": "*bf16", "numel": "i32", "begins": "constexpr", "num_elements": "constexpr"}
    constants = {"begins": begins, "num_elements": accumulate_kernel.NUM_ELEMENTS}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    source = ASTSource(accumulate_kernel.kernel, signature, constants, aligned)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": accumulate_kernel.NUM_WARPS})
    assert "ld.global.v4" in compiled.asm["ptx"], "memory must be read in wide words"
    assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_gives_the_bits_of_the_plain_sum_on_a_gpu() -> None:
    accumulate_cases.check("cuda")
