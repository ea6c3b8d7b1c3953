"""Adapters as diffusers and peft load them, and merged into the model that they belong to."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from fluxray.checkpoint import CheckpointReader
from fluxray.config.adapter import LoraConfig
from fluxray.config.schema import ModelConfig
from fluxray.engine.state import BASE, IDENTITY, base_in, check_base, check_same_model
from fluxray.errors import CheckpointError
from fluxray.export.files import Kept
from fluxray.models import lora, quantised
from fluxray.models.causal_lm import CausalLMStack, meta_model
from fluxray.models.flux import meta_transformer
from fluxray.models.flux_stack import FluxStack
from fluxray.models.weights import PretrainedWeights

PEFT_FILE = "adapter_model.safetensors"
"""What peft calls the weights of an adapter; they lie beside adapter_config.json."""


class Adapters(NamedTuple):
    """The adapters of a checkpoint, and the model that they belong to, on the meta device.

    `stack` is of the library's model without adapters, `weights` are those of its run (None: random ones), `paths` the layers
    that have adapters.
    """

    stack: CausalLMStack | FluxStack
    config: LoraConfig
    weights: str | None
    paths: Sequence[str]
    kept: Kept


def is_adapted(reader: CheckpointReader) -> bool:
    """Return whether a checkpoint holds adapters."""
    return BASE in reader.sections(IDENTITY)


def adapters_of(run: Mapping[str, Any], model_dir: Path, keys: Mapping[str, Any], kept: Kept) -> Adapters:
    """Return the adapters of a run with this configuration, whose library's config.json holds `keys`.

    CheckpointError if the checkpoint holds other ones.
    """
    config = LoraConfig.model_validate(run.get("adapter") or {})
    weights = (run.get("model") or {}).get("weights")
    seed = int(base_in(kept.reader).get("seed", 0))
    if "_class_name" in keys:
        stack = FluxStack(meta_transformer(ModelConfig(config=dict(keys))), seed)
    else:
        stack = CausalLMStack(meta_model(AutoConfig.from_pretrained(model_dir)), seed)
    paths = lora.target_paths(stack.model, config.targets, [block.name for block in stack.blocks])
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        layer = stack.model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        shapes[_name(path, "lora_A")] = (config.rank, layer.in_features)
        shapes[_name(path, "lora_B")] = (layer.out_features, config.rank)
    check_same_model(shapes, kept.reader)
    return Adapters(stack, config, weights, paths, kept)


def write_for_diffusers(adapters: Adapters, folder: Path) -> None:
    """Write `pytorch_lora_weights.safetensors`, by diffusers' own function, which `load_lora_weights` of its pipelines reads."""
    import diffusers

    config = lora.peft_config(adapters.config, adapters.paths, inference_mode=True).to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items() if value is not None}
    names = {"FluxTransformer2DModel": "FluxPipeline", "Flux2Transformer2DModel": "Flux2Pipeline"}
    pipeline = getattr(diffusers, names[type(adapters.stack.model).__name__])
    pipeline.save_lora_weights(folder, _tensors(adapters), transformer_lora_adapter_metadata=plain)


def write_for_peft(adapters: Adapters, tokenizer_dir: Path, folder: Path) -> None:
    """Write what `PeftModel.from_pretrained` reads: adapter_config.json and weights; and the tokenizer."""
    named = None if adapters.weights is None else adapters.weights.partition(":")[2]
    keys = {"base_model_name_or_path": named, "task_type": "CAUSAL_LM", "inference_mode": True}
    lora.peft_config(adapters.config, adapters.paths, **keys).save_pretrained(folder)
    tensors = {f"base_model.model.{name}": tensor for name, tensor in _tensors(adapters).items()}
    save_file(tensors, folder / PEFT_FILE, metadata={"format": "pt"})
    shutil.copytree(tokenizer_dir, folder, dirs_exist_ok=True)


def merged(adapters: Adapters) -> Kept:
    """Return the weights of the whole model, each layer with what its adapter adds, in the format of the export.

    CheckpointError if the base is another one than the adapters were trained on.
    """
    return adapters.kept._replace(reader=MergedReader(adapters), averaged=False)  # averages are in it already


class MergedReader:
    """A whole model, its base read or drawn anew one tensor at a time (see `protocols.StateReader`).

    A base that was kept in 4 bits is what these stand for: that is what the adapters were trained on.
    """

    def __init__(self, adapters: Adapters):
        self._adapters = adapters
        self._kept = adapters.kept._replace(dtype=torch.float32)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in adapters.stack.model.named_parameters()}
        self._adapted = set(adapters.paths)
        self._rounded: set[str] = set()
        if adapters.config.base == "nf4":
            quantised.require_library()
            self._rounded |= set(quantised.layer_paths(adapters.stack.model, [block.name for block in adapters.stack.blocks]))
        self._scale = adapters.config.alpha / adapters.config.rank
        if adapters.weights is None:
            self._read = adapters.stack.first_value
        else:
            weights = PretrainedWeights(adapters.weights)
            self._read = weights.reader(adapters.stack.model)
            check_base(lora.base_of(weights, 0, adapters.config.base), self._kept.reader)

    def names(self) -> list[str]:
        """Return the names of the parameters, tied ones once."""
        return sorted(self._shapes)

    def sections(self, name: str, /) -> Sequence[str]:
        """Return what there is of a parameter."""
        return ["weights"] if name in self._shapes else []

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        if section != "weights" or name not in self._shapes:
            raise CheckpointError(f"checkpoint: holds no {section} of {name}; it is of another model")
        return self._shapes[name]

    def read(self, section: str, name: str, offset: int = 0, num_rows: int | None = None, /) -> Tensor:
        """Return rows of a parameter: fp32, base and adapter summed."""
        self.shape(section, name)
        whole = self._read(name).detach().to(torch.float32, copy=True)
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and path in self._rounded:
            whole = quantised.rounded(whole)
        if leaf == "weight" and path in self._adapted:
            a, b = (self._kept.weight(_name(path, part)) for part in ("lora_A", "lora_B"))
            whole += self._scale * (b @ a)
        if not whole.ndim:
            return whole
        return whole[offset:] if num_rows is None else whole[offset : offset + num_rows]


def _tensors(adapters: Adapters) -> dict[str, Tensor]:
    """Return the adapters in the exported format, by peft's names in files, which leave out how an adapter is called."""
    return {
        f"{path}.{part}.weight": adapters.kept.weight(_name(path, part))
        for path in adapters.paths
        for part in ("lora_A", "lora_B")
    }


def _name(path: str, part: str) -> str:
    return f"{path}.{part}.{lora.NAME}.weight"
