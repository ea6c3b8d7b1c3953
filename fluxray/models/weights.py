"""Published weights: read by the library on rank 0, handed to the other ranks tensor by tensor."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fluxray.errors import ConfigError, one_line


def location(reference: str) -> str:
    """Return what `from_pretrained` takes for `path:DIR` or `hf:NAME`; ConfigError for another form or a missing folder."""
    scheme, _, rest = reference.partition(":")
    if scheme == "hf" and rest:
        return rest
    if scheme == "path" and rest:
        folder = Path(rest).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"model.weights: {reference!r} is no folder; name one that holds config.json and safetensors")
        return str(folder.resolve())
    raise ConfigError(f"model.weights: {reference!r} is neither path:DIR nor hf:NAME")


class PretrainedWeights:
    """Published weights of one model, in the library's names in memory.

    Rank 0 loads them on the host in their stored dtype when they are first asked for (the library renames and converts); every
    rank must then ask for the same parameters in the same order.
    """

    def __init__(self, reference: str):
        self._reference = reference
        self._tensors: dict[str, Tensor] | None = None

    def copy_into(self, model: nn.Module, paths: Collection[str]) -> None:
        """Fill the parameters and persistent buffers that the modules at `paths` hold themselves. Collective over all ranks."""
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        is_source = not distributed or dist.get_rank() == 0
        if self._tensors is None:
            self._tensors = self._load_on_rank_0(distributed, is_source)
        for path in paths:
            module = model.get_submodule(path)
            persistent = {n: b for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set}
            for leaf, target in {**dict(module.named_parameters(recurse=False)), **persistent}.items():
                name = f"{path}.{leaf}" if path else leaf
                with torch.no_grad():
                    if is_source:
                        target.copy_(self._tensors[name])
                    if distributed:
                        dist.broadcast(target.data, src=0)

    def _load_on_rank_0(self, distributed: bool, is_source: bool) -> dict[str, Tensor]:
        """Return the tensors on rank 0 and nothing elsewhere; a fault of rank 0 is raised on every rank."""
        tensors: dict[str, Tensor] = {}
        fault: list[str | None] = [None]
        if is_source:
            try:
                tensors = self._load()
            except ConfigError as error:
                fault = [str(error)]
        if distributed:
            dist.broadcast_object_list(fault, src=0)
        if fault[0] is not None:
            raise ConfigError(fault[0])
        return tensors

    def _load(self) -> dict[str, Tensor]:
        name = location(self._reference)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto", output_loading_info=True)
            model, report = loaded
        except Exception as error:  # noqa: BLE001 - whatever the library and its file readers raise
            raise ConfigError(
                f"model.weights: {self._reference!r} cannot be loaded ({one_line(error)}); check that its files are complete"
            ) from None
        missing = sorted(report["missing_keys"])
        if missing:
            raise ConfigError(
                f"model.weights: {self._reference!r} lacks {missing[0]} and {len(missing) - 1} more; it is another model"
            )
        return dict(model.state_dict(keep_vars=False))
