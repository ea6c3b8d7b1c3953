"""A FLUX transformer with the weights of a checkpoint or a published model, ready for forwards and nothing else.

It is resident where the device has the room; else its blocks are streamed from host memory, 2 bytes a parameter, as in training.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxray.checkpoint import CheckpointReader
from fluxray.config.schema import ModelConfig, OptimConfig
from fluxray.engine.clip import Clip
from fluxray.engine.precision import Precision
from fluxray.engine.state import check_same_model
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.models.weights import PretrainedWeights
from fluxray.optim.restore import restore
from fluxray.optim.states import AVERAGE, StateFormat
from fluxray.protocols import Batch, LossOutput, StateReader
from fluxray.tasks.sampling import Forwards

RESIDENT_SHARE = 0.7
"""Of the free memory of a device that a resident model may take; activations and VAE have the rest."""

SEED = 0
"""Of values that are overwritten."""


class Averaged:
    """A checkpoint whose moving averages are read as its weights, where there are any."""

    def __init__(self, reader: CheckpointReader):
        self._reader = reader
        self.names = reader.names

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        """Return the shape of a whole saved tensor."""
        return self._reader.shape(section, name)

    def sections(self, name: str, /) -> Sequence[str]:
        """Return the sections of a parameter: its weights, and what a frozen one has beside them."""
        found = self._reader.sections(name)
        return ["weights"] if AVERAGE in found else found

    def read(self, section: str, name: str, offset: int, num_rows: int | None, /) -> Tensor:
        """Return rows of a saved tensor."""
        averaged = section == "weights" and AVERAGE in self._reader.sections(name)
        return self._reader.read(AVERAGE if averaged else section, name, offset, num_rows)


def load_forwards(
    model: ModelConfig, weights: StateReader | str, device: torch.device, streamed: bool | None = None
) -> tuple[Forwards, bool]:
    """Return what runs the transformer, and whether it is streamed; `weights` are a checkpoint's, or a published model's name.

    It computes in fp32 on a CPU, in bf16 on a GPU. Whoever does not say `streamed` gets what fits.
    """
    published = PretrainedWeights(weights) if isinstance(weights, str) else None
    stack = build_flux(model, SEED, weights=published)
    stack.model.requires_grad_(False)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if streamed is None:
        streamed = not _fits(stack, dtype, device)
    reader = None if isinstance(weights, str) else weights
    if streamed:
        return _streamed(stack, reader, dtype, device), True
    return _resident(stack, reader, dtype, device), False


def _streamed(stack: FluxStack, reader: StateReader | None, dtype: torch.dtype, device: torch.device) -> Forwards:
    precision: Precision = "fp32" if dtype == torch.float32 else "mixed-bf16"
    clip = Clip("block", 1.0, device)
    engine = StreamEngine(stack, _no_loss, OptimConfig(), clip, StreamSettings(), precision, device)
    if reader is not None:
        engine.load_items(reader)
    return engine.forwards


def _resident(stack: FluxStack, reader: StateReader | None, dtype: torch.dtype, device: torch.device) -> Forwards:
    if reader is not None:
        check_same_model({name: parameter.shape for name, parameter in stack.model.named_parameters()}, reader)
    fmt = StateFormat(dtype, None, quantised=False, decays=False, trained=False)
    for block, owned in _parts(stack):
        stack.materialise(device, block)
        for module in owned:
            nn.Module.to(module, dtype)
    if reader is not None:
        for name, parameter in stack.model.named_parameters():
            restore(reader, name, fmt, {"weights": parameter.detach()})
    stack.eval()

    @torch.no_grad()
    def forwards(batches: Sequence[Batch]) -> list[Tensor]:
        return [stack(batch.to(device), lambda output, _: output) for batch in batches]

    return forwards


def _parts(stack: FluxStack) -> Iterator[tuple[Any, list[nn.Module]]]:
    """Yield each block, and None for the rest, with the modules that are its own."""
    for block in stack.blocks:
        yield block, [block.module]
    yield None, [stack.model]


def _fits(stack: FluxStack, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    needed = sum(parameter.numel() for parameter in stack.model.parameters()) * dtype.itemsize
    return needed <= RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]


def _no_loss(output: Tensor, batch: Any) -> LossOutput:
    raise AssertionError(f"nothing is trained here: {output.shape}, {batch}")


def model_of(folder: Path) -> ModelConfig:
    """Return the model whose config.json lies in `folder`; ConfigError for what cannot be read."""
    from fluxray.config.text import read_file

    return ModelConfig(config=read_file(folder / "config.json", f"RUN: {folder}"))
