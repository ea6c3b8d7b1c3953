import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fluxray.optim.adam8bit import FlatState, adam_step, adam_step_plain
from tests.optim.helpers import CONFIG, FORMATS, control_of, copy_of, num_different, random_state

pytest.importorskip("triton", reason="no Triton on this platform")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from fluxray.optim import adam8bit_kernel
from tests.optim.kernel_cases import differences

SHARED_BYTES_OF_A_BLOCK = {86: 99 * 1024, 90: 227 * 1024}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8"}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def test_interpreted_kernel_equals_the_plain_step_bit_for_bit() -> None:
    """In a process of its own: Triton reads the variable once, when it is first imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.optim.kernel_cases"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 20
    assert {name: counts for name, counts in found.items() if any(counts.values())} == {}


@pytest.mark.parametrize("capability", SHARED_BYTES_OF_A_BLOCK)
@pytest.mark.parametrize("name", FORMATS)
def test_compiles_without_a_gpu(name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile(source(name), target=GPUTarget("cuda", capability, 32), options=adam8bit_kernel.OPTIONS)
    assert compiled.metadata.shared <= SHARED_BYTES_OF_A_BLOCK[capability]
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
    # Root and reciprocal are written in PTX, with fused steps. Besides them only the search of codes may fuse.
    generated = re.sub(r"// begin inline asm.*?// end inline asm", "", compiled.asm["ptx"], flags=re.DOTALL)
    assert FORMATS[name].quantised or "fma.rn.f32" not in generated


def source(name: str) -> ASTSource:
    """Return the kernel as `launch` compiles it for a format."""
    state, gradient = random_state(FORMATS[name], 4096)
    arguments = adam8bit_kernel.arguments(state, gradient, CONFIG, 1e-3, control_of(1), noise=1, offset=0)
    constants = adam8bit_kernel.flags(state, offset=0) | {key: None for key, value in arguments.items() if value is None}
    signature = {key: _type(key, value) for key, value in arguments.items()} | dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index, key in enumerate(signature) if signature[key].startswith("*")}
    return ASTSource(adam8bit_kernel.kernel, signature, constants, aligned)


def _type(name: str, value: object) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i64" if name == "numel" else "i32"


@pytest.mark.gpu
@NEEDS_GPU
def test_kernel_equals_the_plain_step_bit_for_bit_on_a_gpu() -> None:
    found = dict(differences("cuda", num_blocks=4001))
    assert {name: counts for name, counts in found.items() if any(counts.values())} == {}


@pytest.mark.gpu
@NEEDS_GPU
def test_the_host_does_not_wait_for_the_gpu() -> None:
    state, gradient = random_state(FORMATS["split24 8-bit moments"], 4096)
    state, gradient, control = copy_of(state, "cuda"), gradient.cuda(), control_of(3).cuda()
    adam_step(state, gradient, CONFIG, 1e-3, control, noise=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        adam_step(state, gradient, CONFIG, 1e-3, control, noise=2, offset=2**40)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@NEEDS_GPU
def test_a_run_of_more_than_2_to_the_31_elements() -> None:
    numel, tail = 2**31 + 4096, 8192
    if torch.cuda.mem_get_info()[0] < 12 * numel:
        pytest.skip("less than 24 GiB of GPU memory are free")
    sizes = [(numel, torch.bfloat16), (numel, torch.int8), (numel, torch.uint8), (numel, torch.uint8)]
    sizes += [(numel // 256, torch.float32)] * 2
    whole = FlatState(*(torch.zeros(size, dtype=dtype, device="cuda") for size, dtype in sizes))
    gradient = torch.zeros(numel, device="cuda")
    gradient[-tail:] = torch.randn(tail, device="cuda")
    last = copy_of(whole.slice(numel - tail, numel), "cuda")
    control = control_of(1).cuda()
    adam_step(whole, gradient, CONFIG, 1e-3, control, noise=5)
    adam_step_plain(last, gradient[-tail:], CONFIG, 1e-3, control, 5, offset=numel - tail)
    assert not any(num_different(whole.slice(numel - tail, numel), last).values())
