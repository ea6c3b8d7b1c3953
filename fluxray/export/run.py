"""From the newest checkpoint of a run to the library's own format, or to the one that ComfyUI loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from fluxray.checkpoint import MODEL_DIR, TOKENIZER_DIR, CheckpointReader, committed, open_newest
from fluxray.config import text
from fluxray.errors import CheckpointError, ConfigError
from fluxray.export.adapter import Adapters, adapters_of, is_adapted, merged, write_for_diffusers, write_for_peft
from fluxray.export.causal_lm import exported_model, write_language_model
from fluxray.export.files import Kept, check_target, filled_or_empty
from fluxray.export.flux import exported_transformer, write_bfl, write_pipeline
from fluxray.optim.states import AVERAGE

RUN_CONFIG = "config.yaml"
"""The run's configuration; its `model.weights` tells the pipeline that a FLUX run began from."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Form = Literal["library", "bfl"]


def export_run(  # noqa: PLR0913, PLR0917 - what `fluxray export` takes
    run_dir: Path,
    out_dir: Path,
    dtype: Literal["fp32", "bf16"] = "fp32",
    form: Form = "library",
    notify: Callable[[str], None] = print,
    averaged: bool = False,
    merge: bool = False,
) -> Path:
    """Write the newest checkpoint of a run in the form of its library, and return the folder.

    A language model comes with config.json and tokenizer, a FLUX transformer within the pipeline that its run began from. `bfl`
    writes one file instead, `out_dir`/NAME.safetensors, and returns it. `fp32` keeps the trained values exactly, correction
    included; `bf16` rounds them to nearest. `averaged` writes their moving averages in their place. A run that trained adapters
    is written as these alone, for diffusers' `load_lora_weights` or peft, or with `merge` as the whole model.

    Raises ConfigError if `out_dir` exists and is not empty or cannot be written, or if there is no such form of the model;
    CheckpointError if the run has no usable checkpoint, one of another model or one without averages. What was written before a
    failure is removed.
    """
    check_target(out_dir)
    reader = open_newest(committed(run_dir), notify)
    if reader is None:
        raise CheckpointError(f"RUN: {run_dir.name} has no checkpoint yet; train it first")
    if averaged:
        require_averages(reader, run_dir.name)
    kept = Kept(reader, DTYPES[dtype], averaged)
    keys = _model_keys(run_dir)
    if is_adapted(reader):
        adapters = adapters_of(_run_keys(run_dir), run_dir / MODEL_DIR, keys, kept)
        if not merge:
            return _export_adapters(run_dir, adapters, "_class_name" in keys, out_dir, form)
        kept = merged(adapters)
    elif merge:
        raise ConfigError(f"--merge: {run_dir.name} trained the whole model, and no adapter; drop it")
    if "_class_name" in keys:
        return _export_flux(run_dir, keys, kept, out_dir, form, notify)
    if form == "bfl":
        raise ConfigError(f"--format: bfl is a format of FLUX models, {run_dir.name} is a language model; drop it")
    _require(run_dir, TOKENIZER_DIR)
    model = exported_model(run_dir / MODEL_DIR, run_dir / TOKENIZER_DIR, kept)
    with filled_or_empty(out_dir):
        write_language_model(model, run_dir / TOKENIZER_DIR, kept, out_dir)
    return out_dir


def _export_adapters(run_dir: Path, adapters: Adapters, is_flux: bool, out_dir: Path, form: Form) -> Path:
    if form == "bfl":
        raise ConfigError(f"--format: bfl is a format of whole models, and {run_dir.name} trained an adapter; add --merge")
    if not is_flux:
        _require(run_dir, TOKENIZER_DIR)
    with filled_or_empty(out_dir):
        if is_flux:
            write_for_diffusers(adapters, out_dir)
        else:
            write_for_peft(adapters, run_dir / TOKENIZER_DIR, out_dir)
    return out_dir


def require_averages(reader: CheckpointReader, run: str) -> None:
    """Raise CheckpointError unless moving averages of the weights were saved."""
    if not any(AVERAGE in reader.sections(name) for name in reader.names()):
        raise CheckpointError(f"--ema: {run} keeps no average of its weights; drop it, or train with ema.decay=0.999")


def _export_flux(
    run_dir: Path, keys: dict[str, Any], kept: Kept, out_dir: Path, form: Form, notify: Callable[[str], None]
) -> Path:
    weights = (_run_keys(run_dir).get("model") or {}).get("weights")
    model = exported_transformer(keys, kept)
    with filled_or_empty(out_dir):
        if form == "library":
            write_pipeline(model, weights, kept, out_dir, notify)
            return out_dir
        file = out_dir / f"{run_dir.name}.safetensors"
        write_bfl(model, kept, file)
        return file


def _run_keys(run_dir: Path) -> dict[str, Any]:
    _require(run_dir, RUN_CONFIG)
    return text.read_file(run_dir / RUN_CONFIG, str(run_dir / RUN_CONFIG))


def _model_keys(run_dir: Path) -> dict[str, Any]:
    _require(run_dir, MODEL_DIR)
    try:
        return dict(json.loads((run_dir / MODEL_DIR / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise CheckpointError(f"RUN: {run_dir / MODEL_DIR} has no readable config.json; name the folder of a run") from None


def _require(run_dir: Path, part: str) -> None:
    if not (run_dir / part).exists():
        kind = "file" if part == RUN_CONFIG else "folder"
        raise CheckpointError(f"RUN: {run_dir} lacks its {kind} {part}; name the folder of a run as it was trained")
