from dataclasses import replace
from typing import Any

import pytest
import torch

from fluxray.config.load import resolve
from fluxray.errors import ConfigError
from fluxray.models import kernels
from fluxray.models.attention import KERNELS
from fluxray.models.causal_lm import library_config
from fluxray.models.kernels import Setting, candidates, choose, prove
from fluxray.runtime.attention import expected_kernel, setting_of

HOST = Setting("cpu", None, torch.float32, True, (), 0.0, 4, 2, 16, 40, False)
H200 = Setting("cuda", (9, 0), torch.bfloat16, False, (), 0.0, 32, 8, 128, 2048, False)
A6000 = replace(H200, capability=(8, 6))


@pytest.mark.parametrize(
    ("setting", "order"),
    [
        (HOST, ["flash", "math"]),
        (replace(HOST, dropout=0.1), ["math"]),
        (H200, ["cudnn", "flash", "efficient", "math"]),
        (replace(H200, deterministic=True), ["flash", "efficient", "math"]),
        (replace(H200, dropout=0.1), ["flash", "efficient", "math"]),
        (replace(H200, head_dim=256), ["flash", "efficient", "math"]),
        (replace(H200, dtype=torch.float32), ["efficient", "math"]),
        (replace(H200, packed=True), ["varlen", "efficient", "math"]),
        (replace(H200, windows=(512,)), ["varlen", "efficient", "math"]),
        (replace(H200, packed=True, dropout=0.1), ["efficient", "math"]),
        (replace(H200, head_dim=20), ["math"]),
        (A6000, ["flash", "efficient", "math"]),
        (replace(A6000, head_dim=208, packed=True), ["efficient", "math"]),
        (replace(H200, capability=(12, 0)), ["flash", "efficient", "math"]),
        (replace(H200, capability=None), ["flash", "efficient", "math"]),
    ],
)
def test_auto_takes_the_fastest_that_can_serve(setting: Setting, order: list[str]) -> None:
    assert candidates("auto", setting) == order


@pytest.mark.parametrize(
    ("kernel", "setting", "message"),
    [
        ("cudnn", HOST, "torch cannot train with it on a CPU; set attention=flash or math"),
        ("flex", HOST, "torch cannot train with it on a CPU"),
        ("flash", replace(HOST, dropout=0.1), "it has no dropout, and attention_dropout is 0.1; set attention=math"),
        ("varlen", replace(H200, dropout=0.1), "it has no dropout, .*; set attention=flash, or attention_dropout to 0"),
        ("flex", replace(H200, dropout=0.1, packed=True), "it has no dropout, .*; set attention=efficient"),
        ("cudnn", replace(H200, packed=True), "it takes no mask, .*; set data.packing=false, or attention=varlen or flex"),
        ("flash", replace(H200, packed=True), "it takes no mask, .*; set data.packing=false, or attention=varlen or flex"),
        ("flash", replace(H200, windows=(512,)), "no sliding window, the model has one of 512 positions; set attention=varlen"),
        ("varlen", replace(H200, dtype=torch.float32), "computes in 16 bits, and precision is fp32; set precision=mixed-bf16"),
        ("cudnn", replace(H200, deterministic=True), "not deterministic, and deterministic is true; set attention=flash"),
        ("cudnn", replace(H200, head_dim=256), "heads up to 128, the model's have 256; set attention=flash"),
        ("flash", replace(H200, head_dim=512), "heads up to 256, the model's have 512; set attention=efficient"),
        ("flash", replace(H200, head_dim=20), "heads of a multiple of 8, the model's have 20; set attention=math"),
        ("flash", replace(A6000, head_dim=208), "shared memory is too small for its backward at heads of 208"),
        ("varlen", replace(H200, capability=(7, 5)), "compute capability 8.0; set attention=efficient"),
    ],
)
def test_what_cannot_serve_is_refused_in_one_line(kernel: Any, setting: Setting, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^attention: '{kernel}'; .*{message}") as error:
        candidates(kernel, setting)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_proof_accepts_what_computes_attention(kernel: Any, dtype: torch.dtype) -> None:
    prove(kernel, replace(HOST, dtype=dtype, windows=(7,)), torch.device("cpu"))


@pytest.mark.parametrize("fault", ["window ignored", "wrong gradient", "not finite"])
def test_proof_refuses_what_does_not(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    intact = kernels.attend

    def broken(*args: Any, **kwargs: Any) -> Any:
        if kwargs["kernel"] != "flash":
            return intact(*args, **kwargs)
        if fault == "window ignored":
            args = (*args[:4], args[4] | True)
        output, _ = intact(*args, **kwargs)
        if fault == "wrong gradient":
            return output.detach() + 0.9 * (output - output.detach()), None
        return (output * torch.nan if fault == "not finite" else output), None

    monkeypatch.setattr(kernels, "attend", broken)
    with pytest.raises(RuntimeError, match="is off by"):
        prove("flash", replace(HOST, windows=(7,)), torch.device("cpu"))


def test_one_that_fails_on_the_device_is_passed_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(kernel: str, *_: Any) -> None:
        if kernel == "flash":
            raise RuntimeError("mha_graph.execute\nsecond line")

    monkeypatch.setattr(kernels, "prove", fails)
    said: list[str] = []
    assert choose("auto", HOST, torch.device("cpu"), said.append) == "math"
    assert said[0].startswith("attention: 'flash' fails on this device (mha_graph.execute")
    assert said[0].endswith("; using the next")
    assert len(said) == 1
    with pytest.raises(ConfigError, match=r"attention: 'flash' fails on this device .*; set attention=auto"):
        choose("flash", HOST, torch.device("cpu"), said.append)


def test_the_setting_is_that_of_configuration_and_model() -> None:
    config = resolve("fsdp8", "qwen3-8b", ["data.max_slice=4096", "data.packing=false", "deterministic=true"])
    found = setting_of(config, library_config(config.model))
    assert found == Setting("cuda", None, torch.bfloat16, False, (), 0.0, 32, 8, 128, 4096, True)
    words = ["model.config.use_sliding_window=true", "model.config.sliding_window=4096"]
    words.append(f"model.config.layer_types=[{', '.join(['sliding_attention', 'full_attention'] * 18)}]")
    for length, windows in ((4096, (4096,)), (4095, ())):
        config = resolve("fsdp8", "qwen3-8b", [*words, f"data.max_slice={length}"])
        assert setting_of(config, library_config(config.model)).windows == windows


@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
def test_the_key_decides(kernel: Any) -> None:
    config = resolve("fsdp8", "qwen3-8b", [f"attention={kernel}", "data.packing=false"])
    assert expected_kernel(config, library_config(config.model)) == ("flash" if kernel == "auto" else kernel)
