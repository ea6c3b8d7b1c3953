"""From a checkpoint to a folder that `AutoModelForCausalLM.from_pretrained` loads. The host holds one file of it at a time."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from fluxray.checkpoint import CheckpointReader, committed, open_newest
from fluxray.engine.state import check_same_model
from fluxray.errors import CheckpointError, ConfigError, one_line
from fluxray.models.causal_lm import meta_model
from fluxray.models.names import names_on_disk
from fluxray.optim.restore import restore
from fluxray.optim.states import StateFormat

MODEL_DIR = "model"
"""Folder of a run that holds the library's config.json."""

TOKENIZER_DIR = "tokenizer"
"""Folder of a run that holds its tokenizer."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

FILE_BYTES = 5 * 10**9
"""What a file of weights may hold; a larger tensor has one for itself."""

MASTER = StateFormat(torch.float32, None, quantised=False, decays=False, trained=False)
"""How an exported fp32 weight is kept: whole, and alone."""


def export_run(
    run_dir: Path, out_dir: Path, dtype: Literal["fp32", "bf16"] = "fp32", notify: Callable[[str], None] = print
) -> Path:
    """Write the newest checkpoint of a run as the library's own format, with tokenizer and config.json; return the folder.

    `fp32` keeps the trained values exactly, correction included; `bf16` rounds them to nearest. Raises ConfigError if `out_dir`
    exists and is not empty or cannot be written, CheckpointError if the run has no usable checkpoint or one of another model.
    What was written before a failure is removed.
    """
    _check_target(out_dir)
    reader = open_newest(committed(run_dir), notify)
    if reader is None:
        raise CheckpointError(f"RUN: {run_dir.name} has no checkpoint yet; train it first")
    for part in (MODEL_DIR, TOKENIZER_DIR):
        if not (run_dir / part).is_dir():
            raise CheckpointError(f"RUN: {run_dir} lacks its folder {part}; name the folder of a run as it was trained")
    model = meta_model(_exported_config(run_dir))
    torch.nn.Module.to(model, DTYPES[dtype])
    check_same_model({name: parameter.shape for name, parameter in model.named_parameters()}, reader)
    model.config.use_cache = True
    with _filled_or_empty(out_dir):
        _write_model(model, reader, out_dir)
        shutil.copytree(run_dir / TOKENIZER_DIR, out_dir, dirs_exist_ok=True)
    return out_dir


def _write_model(model: PreTrainedModel, reader: CheckpointReader, folder: Path) -> None:
    """Write config.json, generation_config.json and weights as the library's `save_pretrained` does.

    Where the library does more than rename on the way to its files, it is given the whole model.
    """
    keys = names_on_disk(model)
    if keys is None:
        weights = {name: _weight(reader, name, model.dtype) for name in reader.names()}
        with _without_progress_bar():
            model.save_pretrained(folder, state_dict=weights)
        return
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        assert model.generation_config is not None
        model.generation_config.save_pretrained(folder)
    names = {key: name for name, key in keys.items()}
    shapes: dict[str, Tensor] = {key: model.get_parameter(name) for key, name in names.items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_BYTES)
    for file, held in split.filename_to_tensors.items():
        weights = {key: _weight(reader, names[key], model.dtype) for key in held}
        save_file(weights, folder / file, metadata={"format": "pt"})
        del weights  # before those of the next file are read
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _weight(reader: CheckpointReader, name: str, dtype: torch.dtype) -> Tensor:
    """Return a parameter's trained values, a copy of its own."""
    values = torch.empty(reader.shape("weights", name), dtype=dtype)
    if dtype == torch.float32:
        restore(reader, name, MASTER, {"weights": values})
    else:
        values.copy_(reader.read("weights", name))
    return values


@contextmanager
def _filled_or_empty(out_dir: Path) -> Iterator[None]:
    """Make the folder, which must be empty if it exists; empty it again if what fills it fails."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in out_dir.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(
                f"DIR: {out_dir} cannot be written ({one_line(error)}); free space there or name another folder"
            ) from None
        raise


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Keep transformers' own bar off the screen; its setting is global."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _exported_config(run_dir: Path) -> PretrainedConfig:
    """Return the run's model configuration; its end of text is the tokenizer's, where a family's default says otherwise."""
    config = AutoConfig.from_pretrained(run_dir / MODEL_DIR)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / TOKENIZER_DIR)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if tokenizer.eos_token_id not in ends:
        config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
    return config


def _check_target(out_dir: Path) -> None:
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"DIR: {out_dir} exists and is not empty; name another folder")
    for parent in out_dir.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(f"DIR: {out_dir} cannot be made, {parent} is a file; name another folder")
