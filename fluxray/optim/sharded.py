"""The optimizers of fp32 masters that are whole on one device, or sharded by rows: each rank keeps and steps its own rows."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from fluxray.config.schema import OptimConfig
from fluxray.optim.adam8bit import AdamConfig, FlatState, adam_step, bias_corrections
from fluxray.optim.formats import zero_code
from fluxray.optim.paged import SMALLEST_PAGED, PagedMemory
from fluxray.optim.restore import MOMENTS
from fluxray.optim.rows import Rows
from fluxray.optim.states import QUANT_BLOCK, state_format
from fluxray.protocols import StateItem, StateReader


class ShardedOptimizer(Protocol):
    """Steps named parameters and holds their optimizer state."""

    def step(self, lr: float, withheld: Tensor) -> None:
        """Step by the gradients and free them. Where `withheld` (fp32 scalar on the device) is 1, nothing else changes."""
        ...

    def state_items(self, name: str) -> Iterator[StateItem]:
        """Yield what is kept of a parameter beside its weights."""
        ...

    def load(self, name: str, reader: StateReader) -> bool:
        """Replace weights and state of a parameter, saved in any format; return whether anything was rounded."""
        ...


class FusedAdamW:
    """PyTorch's AdamW with fused=True, whose moments are fp32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW):
        self._parameters = parameters
        self._optimizer = optimizer

    def step(self, lr: float, withheld: Tensor) -> None:
        """See ShardedOptimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.found_inf = withheld  # pyright: ignore[reportAttributeAccessIssue]  (as torch.amp.GradScaler sets it)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state_items(self, name: str) -> Iterator[StateItem]:
        """See ShardedOptimizer; there is nothing before the first step."""
        state = self._optimizer.state.get(self._parameters[name], {})
        for section in MOMENTS:
            if section in state:
                rows = Rows.of(state[section])
                yield rows.item(section, name, rows.local)
        if "step" in state:
            yield StateItem("step", name, (), None, state["step"])

    @torch.no_grad()
    def load(self, name: str, reader: StateReader) -> bool:
        """See ShardedOptimizer."""
        parameter = self._parameters[name]
        stepped = "step" in reader.sections(name)
        state = {section: torch.zeros_like(parameter) for section in MOMENTS} if stepped else {}
        fmt = state_format(parameter.shape, False, "fp32", torch.float32, trained=stepped)
        narrowed = Rows.of(parameter).restore(reader, name, fmt, {key: Rows.of(moment).local for key, moment in state.items()})
        self._optimizer.state.pop(parameter, None)
        if stepped:
            step = reader.read("step", name, 0, None).to(parameter.device)
            self._optimizer.state[parameter] = {"step": step, **state}
        return narrowed


class Adam8bit:
    """AdamW with 8-bit moments where `state_format` says so; every other parameter keeps fp32 ones.

    A block of 256 elements that share an absmax never leaves its row, and ranks share a parameter by whole rows, so neither their
    number nor a checkpoint's changes a bit of the states. Those of large parameters lie in `paged` memory, if there is some.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig, paged: PagedMemory | None = None):
        self._paged = paged
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        self._formats = {name: state_format(p.shape, True, "fp32", torch.float32) for name, p in self._parameters.items()}
        self._sections = {name: self._empty_sections(name, Rows.of(p).local) for name, p in self._parameters.items()}
        decayed, plain = (AdamConfig(config.beta1, config.beta2, config.eps, decay) for decay in (config.weight_decay, 0.0))
        self._configs = {name: decayed if fmt.decays else plain for name, fmt in self._formats.items()}
        self._plain = plain
        device = next(iter(parameters.values())).device
        self._steps = dict(zip(self._parameters, torch.zeros(len(self._parameters), device=device).unbind(), strict=True))

    @torch.no_grad()
    def step(self, lr: float, withheld: Tensor) -> None:
        """See ShardedOptimizer."""
        stepped = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        counts = torch.stack([self._steps[name] for name in stepped]) + 1
        ok = 1 - withheld
        controls = torch.stack([torch.ones_like(counts), ok.expand_as(counts), *bias_corrections(counts, self._plain)], dim=1)
        for name, control in zip(stepped, controls.unbind(), strict=True):
            parameter = self._parameters[name]
            assert parameter.grad is not None
            gradient = Rows.of(parameter.grad).local
            parameter.grad = None
            if gradient.numel() > 0:
                if self._paged is not None:
                    self._paged.prefetch(name)
                adam_step(self._flat_state(name), gradient.reshape(-1), self._configs[name], lr, control, noise=0)
        torch._foreach_add_([self._steps[name] for name in stepped], [ok] * len(stepped))  # waits for a lone tensor

    def state_items(self, name: str) -> Iterator[StateItem]:
        """See ShardedOptimizer."""
        if name in self._parameters:
            rows = Rows.of(self._parameters[name])
            for section, tensor in self._sections[name].items():
                yield rows.item(section, name, tensor)
            yield StateItem("step", name, (), None, self._steps[name])

    @torch.no_grad()
    def load(self, name: str, reader: StateReader) -> bool:
        """See ShardedOptimizer."""
        if name in self._frozen:
            fmt = state_format(self._frozen[name].shape, True, "fp32", torch.float32, trained=False)
            return Rows.of(self._frozen[name]).restore(reader, name, fmt, {})
        saved = reader.read("step", name, 0, None) if "step" in reader.sections(name) else torch.zeros(())
        self._steps[name].copy_(saved)
        return Rows.of(self._parameters[name]).restore(reader, name, self._formats[name], self._sections[name])

    def _flat_state(self, name: str) -> FlatState:
        """Return views; FSDP may put a parameter's own memory elsewhere, so they are made anew."""
        sections = {section: tensor.view(-1) for section, tensor in self._sections[name].items()}
        absmax = (sections.get("exp_avg_absmax"), sections.get("exp_avg_sq_absmax"))
        weight = Rows.of(self._parameters[name]).local.view(-1)
        return FlatState(weight, None, sections["exp_avg"], sections["exp_avg_sq"], *absmax)

    def _empty_sections(self, name: str, local: Tensor) -> dict[str, Tensor]:
        """Return the state of rows that have not been stepped, one section behind the other in memory of their own.

        Moments are shaped like the rows, absmax [rows, elements of a row / 256].
        """
        fmt = self._formats[name]
        wanted = fmt.state_sections(local.numel())
        num_bytes = sum(section.num_bytes for section in wanted)
        if self._paged is not None and local.numel() >= SMALLEST_PAGED:
            memory = self._paged.allocate(name, num_bytes)
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=local.device)
        sections: dict[str, Tensor] = {}
        for section, part in zip(wanted, memory.split([section.num_bytes for section in wanted]), strict=True):
            is_moment = section.name in MOMENTS
            shape = local.shape if is_moment else (local.shape[0], local.shape[1:].numel() // QUANT_BLOCK)
            first = zero_code(MOMENTS[section.name]) if is_moment and fmt.quantised else 0
            sections[section.name] = part.view(section.dtype).view(shape).fill_(first)
        return sections
