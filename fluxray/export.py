"""From a checkpoint to a folder that `AutoModelForCausalLM.from_pretrained` loads."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

from fluxray.checkpoint import committed, open_newest
from fluxray.errors import CheckpointError, ConfigError
from fluxray.models.causal_lm import meta_model

MODEL_DIR = "model"
"""Folder of a run that holds the library's config.json."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_run(run_dir: Path, out_dir: Path, dtype: Literal["fp32", "bf16"] = "fp32", notify: Callable[[str], None] = print) -> Path:
    """Write the newest checkpoint of a run as the library's own format, with tokenizer and config.json; return the folder.

    `fp32` keeps the trained values exactly; `bf16` rounds them to nearest. Raises ConfigError if `out_dir` exists and is not empty,
    CheckpointError if the run has no usable checkpoint.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"DIR: {out_dir} exists and is not empty; name another folder")
    reader = open_newest(committed(run_dir), notify)
    if reader is None:
        raise CheckpointError(f"RUN: {run_dir.name} has no checkpoint yet; train it first")
    names = reader.names()
    model_config = AutoConfig.from_pretrained(run_dir / MODEL_DIR)
    model = meta_model(model_config).to(DTYPES[dtype])
    expected = {name for name, _ in model.named_parameters()}
    if set(names) != expected:
        raise CheckpointError(f"RUN: {reader.directory} holds another model ({sorted(set(names) ^ expected)[0]} differs)")
    weights = {name: reader.read("weights", name).to(DTYPES[dtype]) for name in names}
    model.config.use_cache = True
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir, state_dict=weights)
    shutil.copytree(run_dir / "tokenizer", out_dir, dirs_exist_ok=True)
    return out_dir
