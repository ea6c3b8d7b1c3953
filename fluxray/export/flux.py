"""A FLUX transformer as diffusers saves it, inside the pipeline that its run began from; or as one file of black-forest-labs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxray.config.schema import ModelConfig
from fluxray.engine.state import check_same_model
from fluxray.errors import ConfigError
from fluxray.export.files import Kept, write_shards, write_streamed
from fluxray.models.bfl import CONFIG_KEY, bfl_layout, shape_of
from fluxray.models.flux import meta_transformer
from fluxray.models.pipeline import INDEX, TRANSFORMER, components, pipeline_folder


def exported_transformer(config: dict[str, Any], kept: Kept) -> nn.Module:
    """Return the run's transformer, on the meta device, in the exported format; CheckpointError for another one's checkpoint."""
    model = nn.Module.to(meta_transformer(ModelConfig(config=config)), kept.dtype)  # diffusers' own `to` warns
    check_same_model({name: parameter.shape for name, parameter in model.named_parameters()}, kept.reader)
    return model


def write_pipeline(model: Any, weights: str | None, kept: Kept, folder: Path, notify: Callable[[str], None]) -> None:
    """Write `transformer/` as diffusers' `save_pretrained` does, and what else the pipeline that `weights` names consists of.

    Without such a pipeline, or where it is gone, the transformer is all, and `notify` is told.
    """
    source, why = None, "the run began from none"
    if weights is not None:
        try:
            source, why = pipeline_folder(weights), f"{weights} is a transformer alone"
        except ConfigError as error:
            why = str(error)
    if source is None:
        notify(f"only {TRANSFORMER}/ is written, no pipeline around it: {why}")
    else:
        _copy_rest(source, folder)
    within = folder / TRANSFORMER
    model.save_config(within)
    like: dict[str, Tensor] = dict(model.named_parameters())
    write_shards(kept, {name: name for name in like}, like, within, "diffusion_pytorch_model{suffix}.safetensors")


def write_bfl(model: Any, kept: Kept, file: Path) -> None:
    """Write one file, under names without a prefix. Its metadata hold diffusers' configuration: shapes do not tell all of it."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    layout = bfl_layout(type(model).__name__, shapes)

    def read(key: str) -> Tensor:
        parts = layout[key]
        if len(parts) == 1:
            return kept.weight(parts[0].name)
        rows = [kept.weight(part.name).narrow(0, part.first, part.num_rows) for part in parts]
        return torch.cat(rows)

    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    metadata = {"format": "pt", CONFIG_KEY: json.dumps(config)}
    write_streamed(file, {key: shape_of(parts, shapes) for key, parts in layout.items()}, kept.dtype, read, metadata)


def _copy_rest(source: Path, folder: Path) -> None:
    """Copy a pipeline's components but for its transformer, its index and its licence."""
    for name in components(source):
        shutil.copytree(source / name, folder / name)
    for file in (source / INDEX, *sorted(source.glob("LICENSE*"))):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
