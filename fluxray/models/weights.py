"""Published weights: read on rank 0 tensor by tensor, and handed to the other ranks as they are read."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from fluxray.errors import ConfigError, one_line
from fluxray.models import lora, quantised
from fluxray.models.fused import FusedLinear, library_tensors
from fluxray.models.names import names_in_memory
from fluxray.models.pipeline import flux_tensors
from fluxray.models.stored import Stored, tensors_in

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

NOT_PLAIN = ("quantization_config", "transformers_weights")
"""Keys of a config.json with which the library does more than open the usual files."""

Read = Callable[[str], Tensor]
"""From a name in memory to the tensor as it is stored."""


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
    """Published weights of one model of transformers or of a FLUX transformer of diffusers, in the library's names in memory.

    Rank 0 opens the files when they are first asked for, checks names and shapes of all, and then maps one tensor at a time: the
    host holds no copy of the model. Where a tensor must be converted and not only renamed, or the files are not safetensors, it
    lets the library load the whole model on the host first. Every rank must ask for the same parameters in the same order.
    """

    def __init__(self, reference: str):
        self._reference = reference
        self._read: Read | None = None
        self._shapes: Mapping[str, torch.Size] = {}

    def identity(self) -> str | None:
        """Return a hash of what has been read: 16 hex digits; None on ranks that read nothing.

        Of each parameter it takes name, shape and the first row, as bf16, so that copies in another dtype have the same.
        """
        if self._read is None or not self._shapes:
            return None
        digest = hashlib.blake2b(digest_size=8)
        for name, shape in sorted(self._shapes.items()):
            first = self._read(name)[:1] if shape else self._read(name)
            digest.update(repr((name, list(shape))).encode())
            digest.update(first.detach().to(torch.bfloat16).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def reader(self, model: nn.Module) -> Read:
        """Return what reads a parameter of `model`, which may be on the meta device, on the only rank. ConfigError as above."""
        self._read = self._open(model)
        return self._read

    def copy_into(self, model: nn.Module, paths: Collection[str]) -> None:
        """Fill the parameters and persistent buffers that the modules at `paths` hold themselves. Collective over all ranks.

        At the first call, the model must have the names and shapes of the whole one (it may be on the meta device).
        """
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        is_source = not distributed or dist.get_rank() == 0
        if self._read is None:
            self._read = self._open_on_rank_0(model, distributed, is_source)
        for path in paths:
            with quantised.opened(model.get_submodule(path)) as module, torch.no_grad():
                for name, target in _own_tensors(path, module).items():
                    if is_source:
                        target.copy_(self._read(name))
                    if distributed:
                        dist.broadcast(target.data, src=0)

    def _open_on_rank_0(self, model: nn.Module, distributed: bool, is_source: bool) -> Read:
        """Return what reads a tensor on rank 0, and nothing of use elsewhere; a fault of rank 0 is raised on every rank."""
        read: Read = dict[str, Tensor]().__getitem__
        fault: list[str | None] = [None]
        if is_source:
            try:
                read = self._open(model)
            except ConfigError as error:
                fault = [str(error)]
        if distributed:
            dist.broadcast_object_list(fault, src=0)
        if fault[0] is not None:
            raise ConfigError(fault[0])
        return read

    def _open(self, model: nn.Module) -> Read:
        named = {n: t for path, module in model.named_modules() for n, t in _own_tensors(path, module).items()}
        self._shapes = {name: tensor.shape for name, tensor in named.items()}
        if isinstance(model, PreTrainedModel):
            return self._open_language_model(model, named)
        found = flux_tensors(self._reference, {name: tensor.shape for name, tensor in named.items()})
        return lambda name: self._read_stored(found[name])

    def _open_language_model(self, model: PreTrainedModel, named: Mapping[str, Tensor]) -> Read:
        place = location(self._reference)
        try:
            stored = None if _is_not_plain(model.config) else _stored(place)
            keys = None if stored is None else names_in_memory(model, stored, named)
            if stored is None or keys is None:
                return self._load_whole(place)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the library and its file readers raise
            raise self._unreadable(error) from None
        found = {name: stored[key] for name, key in keys.items()}
        for name, tensor in sorted(found.items()):
            if tensor.shape != named[name].shape:
                raise ConfigError(
                    f"model.weights: {self._reference!r} cannot be loaded ({name} is {list(tensor.shape)} in its files, "
                    f"{list(named[name].shape)} by its config.json); take both from one model"
                )
        self._find_tied(named, found)
        self._check_complete(set(named) - set(found))
        return lambda name: self._read_stored(found[name])

    def _find_tied(self, named: Mapping[str, Tensor], found: dict[str, Stored]) -> None:
        """Let the names of one parameter have what is stored under one of them; what is stored under two must be equal."""
        groups: dict[int, list[str]] = {}
        for name, tensor in named.items():
            groups.setdefault(id(tensor), []).append(name)
        for names in groups.values():
            kept = [name for name in names if name in found]
            for name in kept[1:]:
                if not torch.equal(self._read_stored(found[name]), self._read_stored(found[kept[0]])):
                    raise ConfigError(
                        f"model.weights: {self._reference!r} ties {name} to {kept[0]} but stores other values of it; "
                        f"set tie_word_embeddings to false in its config.json"
                    )
            found.update({name: found[kept[0]] for name in names if kept})

    def _check_complete(self, missing: Collection[str]) -> None:
        if missing:
            raise ConfigError(
                f"model.weights: {self._reference!r} lacks {min(missing)} and {len(missing) - 1} more; it is another model"
            )

    def _read_stored(self, stored: Stored) -> Tensor:
        """Return a tensor that maps its file; the file is closed when the tensor is let go."""
        try:
            return stored.read()
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from None

    def _load_whole(self, place: str) -> Read:
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype="auto", output_loading_info=True)
        model, report = loaded
        self._check_complete(report["missing_keys"])
        return dict(model.state_dict(keep_vars=False)).__getitem__

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"model.weights: {self._reference!r} cannot be loaded ({one_line(error)}); check that its files are complete"
        )


def _own_tensors(path: str, module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers that a module holds itself, by their names in the library's model."""
    if isinstance(module, FusedLinear):
        return library_tensors(path, module)
    if isinstance(module, quantised.Nf4Linear):
        module = module.whole()
    if lora.layer_of(path) is not None:
        return {}
    path = lora.library_path(path)
    persistent = {n: b for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set}
    own = {**dict(module.named_parameters(recurse=False)), **persistent}
    return {f"{path}.{leaf}" if path else leaf: tensor for leaf, tensor in own.items()}


def _is_not_plain(config: PretrainedConfig) -> bool:
    return any(getattr(config, key, None) is not None for key in NOT_PLAIN)


def _stored(place: str) -> dict[str, Stored] | None:
    """Return every tensor in the safetensors files of a folder or a name on the hub; None if it has none."""
    return tensors_in(_files(place) or ()) or None


def _files(place: str) -> list[str] | None:
    """Return the paths of the safetensors files, fetched from the hub where they are not here."""
    for name in (FILE, INDEX):
        try:
            path = cached_file(place, name)
        except OSError:  # of the hub, too, it is the answer that there is no such file
            continue
        if path is not None:
            return [path] if name == FILE else get_checkpoint_shard_files(place, path)[0]
    return None
