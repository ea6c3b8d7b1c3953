"""Which attention kernel a run gets, what stands against one, and the proof on the device that it computes attention.

The proof comes before anything is trained: forward and backward of the model's own head sizes on packed rows (where the kernel
takes them), against torch's plain mathematics in fp32. A fused kernel sums in another order than the library's own call, so
equality bit for bit is not to be had; `check_stack` holds the rest of the model to that, under the library's own function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fluxray.config.schema import Kernel
from fluxray.errors import ConfigError, one_line
from fluxray.models.attention import PACKED, attend, attention_inputs
from fluxray.models.flux_facts import FluxFacts
from fluxray.models.masks import document_mask
from fluxray.protocols import IGNORE_INDEX, TextBatch

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""How far a proven kernel may be off, as a share of the largest value; bf16 has 8 bits, fp16 11, the judge computes in fp32."""

PROVEN_LENGTH = 1024
"""Positions of a proven row at most: the judge holds all scores."""

HOPPER = 9
"""Major compute capability on which cuDNN's attention is the faster one: 1.7 to 1.9 times flash on an H200, forward and backward
(bf16, causal, 2,048 positions, head sizes 96 and 128). On Ampere and on Blackwell cards others have measured less than 1."""


@dataclass(frozen=True)
class Setting:
    """What decides which kernels can serve a run.

    `capability` is the GPU's, None where it is not known yet. `dtype` is what attention computes in. `packed`: rows hold several
    documents. `windows` are those of the sliding layers that are not longer than a row of `length` positions. Where it is not
    `causal` every position sees all of its row.
    """

    device: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None
    dtype: torch.dtype
    packed: bool
    windows: tuple[int, ...]
    dropout: float
    num_heads: int
    num_shared_heads: int
    head_dim: int
    length: int
    deterministic: bool
    causal: bool = True

    @classmethod
    def of_flux(
        cls,
        facts: FluxFacts,
        *,
        device: Literal["cpu", "cuda"],
        capability: tuple[int, int] | None,
        dtype: torch.dtype,
        length: int,
        deterministic: bool,
    ) -> "Setting":
        """Return the setting of a FLUX transformer in a run whose images have at most `length` tokens with their text."""
        heads = facts.num_heads
        return cls(device, capability, dtype, False, (), 0.0, heads, heads, facts.head_dim, length, deterministic, causal=False)

    @classmethod
    def of(  # noqa: PLR0913 - the run's keys that matter, by name
        cls,
        model: PretrainedConfig,
        *,
        device: Literal["cpu", "cuda"],
        capability: tuple[int, int] | None,
        dtype: torch.dtype,
        packed: bool,
        length: int,
        deterministic: bool,
    ) -> "Setting":
        """Return the setting of a model in a run whose rows have at most `length` positions."""
        heads = model.num_attention_heads
        slides = "sliding_attention" in (getattr(model, "layer_types", None) or ())
        window = model.sliding_window if slides else None
        return cls(
            device,
            capability,
            dtype,
            packed,
            (window,) if window is not None and window <= length else (),
            getattr(model, "attention_dropout", 0.0) or 0.0,
            heads,
            getattr(model, "num_key_value_heads", None) or heads,
            getattr(model, "head_dim", None) or model.hidden_size // heads,
            length,
            deterministic,
        )


def candidates(wanted: Kernel | Literal["auto"], setting: Setting) -> list[Kernel]:
    """Return the kernels that may serve, the best first; raises ConfigError if what was named cannot.

    `auto` never fails: `math` serves every run.
    """
    if wanted != "auto":
        fault = _fault(wanted, setting)
        if fault is not None:
            raise ConfigError(f"attention: {wanted!r}; {fault}")
        return [wanted]
    if setting.device == "cpu":
        order: list[Kernel] = ["flash", "math"]
    elif setting.packed or setting.windows:
        order = ["varlen", "efficient", "math"]
    elif setting.capability is not None and setting.capability[0] == HOPPER:
        order = ["cudnn", "flash", "efficient", "math"]
    else:
        order = ["flash", "efficient", "math"]
    return [kernel for kernel in order if _fault(kernel, setting) is None]


def choose(wanted: Kernel | Literal["auto"], setting: Setting, device: torch.device, notify: Callable[[str], None]) -> Kernel:
    """Return the best kernel that computes attention on `device`, and tell which it is on a GPU.

    One that fails there is passed over for the next, which is told, or refused by ConfigError if it was named.
    """
    found = candidates(wanted, setting)
    for kernel in found:
        try:
            prove(kernel, setting, device)
        except RuntimeError as error:
            fault = f"{kernel!r} fails on this device ({one_line(error)})"
            if kernel == found[-1]:
                raise ConfigError(f"attention: {fault}; set attention={'math' if wanted == 'auto' else 'auto'}") from None
            notify(f"attention: {fault}; using the next")
        else:
            if device.type == "cuda":
                notify(f"attention by {kernel}" + (f", of {', '.join(found)}" if len(found) > 1 else ""))
            return kernel
    raise AssertionError("math serves every run")


def prove(kernel: Kernel, setting: Setting, device: torch.device) -> None:
    """Raise RuntimeError unless the kernel's output and gradients on `device` are those of plain mathematics."""
    generator = torch.Generator().manual_seed(0)
    batch = _batch(min(setting.length, PROVEN_LENGTH), setting.packed).to(device)
    heads, shared = setting.num_heads, setting.num_shared_heads
    length = batch.input_ids.shape[1]
    drawn = [torch.randn(2, length, n, setting.head_dim, generator=generator) for n in (heads, shared, shared)]
    incoming = torch.randn(2, length, heads, setting.head_dim, generator=generator).to(device, setting.dtype)
    for window in (None, *setting.windows) if setting.windows else (None,):
        inputs = [tensor.to(device, setting.dtype) for tensor in drawn]
        found = _run(kernel, batch, window, inputs, incoming, setting.causal)
        exact = [tensor.float() for tensor in (*inputs, incoming)]
        expected = _run("math", batch, window, exact[:3], exact[3], setting.causal)
        for name, tensor, reference in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
            largest = max(reference.abs().max().item(), 1.0)  # drawn at 1; a window of one position leaves gradients of 0
            off = (tensor.float() - reference).abs().max().item() / largest
            if not off <= TOLERANCE[setting.dtype]:
                raise RuntimeError(f"its {name} is off by {off:.2g} of the largest value")


def _run(
    kernel: Kernel, batch: TextBatch, window: int | None, drawn: list[Tensor], incoming: Tensor, causal: bool
) -> list[Tensor]:
    """Return attention's output and the gradients by queries, keys and values of one layer."""
    read = attention_inputs(kernel, batch, {"layer": window})
    inputs: dict[str, Any] = {name.removesuffix(".layer"): tensor for name, tensor in read.items()}
    mask = inputs.pop("mask")
    if kernel == "math" and mask is None and window is not None:
        mask = document_mask(batch.document_ids, window)
    q, k, v = (tensor.transpose(1, 2).detach().requires_grad_() for tensor in drawn)
    scaling = drawn[0].shape[-1] ** -0.5
    with torch.enable_grad():
        options: dict[str, Any] = {"scaling": scaling, "sliding_window": window, "causal": causal}
        output, _ = attend(None, q, k, v, mask, kernel=kernel, **options, **inputs)
        gradients = torch.autograd.grad(output, (q, k, v), incoming)
    return [output.detach(), *gradients]


def _batch(length: int, packed: bool) -> TextBatch:
    """Return two rows; packed, each holds documents of uneven lengths."""
    starts = torch.zeros(2, length, dtype=torch.int64)
    if packed:
        starts[0, [length // 3, length // 2]] = 1
        starts[1, [length // 7, length - 1]] = 1
    document_ids = starts.cumsum(1)
    targets = torch.full_like(document_ids, IGNORE_INDEX)
    count = int((document_ids[:, -1] + 1).sum())
    return TextBatch(targets, targets, document_ids, targets, not packed, 0, num_documents=count)


def _fault(kernel: Kernel, setting: Setting) -> str | None:
    """Return why a kernel cannot serve, and what to do about it."""
    on_cpu = setting.device == "cpu"
    if kernel in PACKED and not setting.causal:
        return f"it is for rows of several documents, and images are not packed; set attention={'math' if on_cpu else 'flash'}"
    if setting.dropout > 0 and (kernel in ("cudnn", "flex", "varlen") or (on_cpu and kernel == "flash")):
        return f"it has no dropout, and attention_dropout is {setting.dropout:g}; {_without_dropout(setting)}"
    if on_cpu:
        return None if kernel in ("flash", "math") else "torch cannot train with it on a CPU; set attention=flash or math"
    if kernel == "math":
        return None
    if kernel in ("flash", "cudnn", "varlen") and setting.dtype == torch.float32:
        return "it computes in 16 bits, and precision is fp32; set precision=mixed-bf16, or attention=efficient"
    if kernel != "flex" and setting.head_dim % 8:
        return f"it wants heads of a multiple of 8, the model's have {setting.head_dim}; set attention=math"
    if kernel in ("flash", "cudnn"):
        masked = _masked(setting)
        if masked is not None:
            return masked
    if kernel == "cudnn":
        return _cudnn_fault(setting)
    if kernel in ("flash", "varlen"):
        return _flash_fault(setting)
    return None


def _masked(setting: Setting) -> str | None:
    if setting.packed:
        return "it takes no mask, and rows hold several documents; set data.packing=false, or attention=varlen or flex"
    if setting.windows:
        return f"it takes no sliding window, the model has one of {setting.windows[0]} positions; set attention=varlen or flex"
    return None


def _cudnn_fault(setting: Setting) -> str | None:
    if setting.deterministic:
        return "its backward is not deterministic, and deterministic is true; set attention=flash"
    if setting.head_dim > 128:
        return f"its backward takes heads up to 128, the model's have {setting.head_dim}; set attention=flash"
    if setting.capability is not None and setting.capability[0] < 8:
        return "it wants a GPU of compute capability 8.0; set attention=efficient"
    return None


def _flash_fault(setting: Setting) -> str | None:
    if setting.head_dim > 256:
        return f"it takes heads up to 256, the model's have {setting.head_dim}; set attention=efficient"
    if setting.capability is None:
        return None
    major, minor = setting.capability
    if major < 8:
        return "it wants a GPU of compute capability 8.0; set attention=efficient"
    small = (major == 8 and minor >= 6) or major == 12
    if small and (192 < setting.head_dim <= 224 or (setting.head_dim > 192 and setting.dropout > 0)):
        return f"this GPU's shared memory is too small for its backward at heads of {setting.head_dim}; set attention=efficient"
    return None


def _without_dropout(setting: Setting) -> str:
    if setting.device == "cpu":
        return "set attention=math"
    return f"set attention={'efficient' if setting.packed or setting.windows else 'flash'}, or attention_dropout to 0"
