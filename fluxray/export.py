"""From a checkpoint to a folder that `AutoModelForCausalLM.from_pretrained` loads."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from fluxray.checkpoint import committed, open_newest
from fluxray.engine.state import check_same_model
from fluxray.errors import CheckpointError, ConfigError
from fluxray.models.causal_lm import meta_model

MODEL_DIR = "model"
"""Folder of a run that holds the library's config.json."""

TOKENIZER_DIR = "tokenizer"
"""Folder of a run that holds its tokenizer."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_run(
    run_dir: Path, out_dir: Path, dtype: Literal["fp32", "bf16"] = "fp32", notify: Callable[[str], None] = print
) -> Path:
    """Write the newest checkpoint of a run as the library's own format, with tokenizer and config.json; return the folder.

    `fp32` keeps the trained values exactly; `bf16` rounds them to nearest. Raises ConfigError if `out_dir` exists and is not
    empty or cannot be made, CheckpointError if the run has no usable checkpoint or one of another model.
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
    weights = {name: reader.read("weights", name).to(DTYPES[dtype]) for name in reader.names()}
    model.config.use_cache = True
    out_dir.mkdir(parents=True, exist_ok=True)
    with _without_progress_bar():
        model.save_pretrained(out_dir, state_dict=weights)
    shutil.copytree(run_dir / TOKENIZER_DIR, out_dir, dirs_exist_ok=True)
    return out_dir


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
