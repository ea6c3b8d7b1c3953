"""A language model as the folder that `AutoModelForCausalLM.from_pretrained` loads."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from fluxray.engine.state import check_same_model
from fluxray.export.files import Kept, write_shards
from fluxray.models.causal_lm import meta_model
from fluxray.models.names import names_on_disk


def exported_model(model_dir: Path, tokenizer_dir: Path, kept: Kept) -> PreTrainedModel:
    """Return the run's model on the meta device, in the exported format; CheckpointError where the checkpoint is of another.

    Its end of text is the tokenizer's, where a family's default says otherwise.
    """
    config = AutoConfig.from_pretrained(model_dir)
    _adopt_ends(config, tokenizer_dir)
    model = meta_model(config)
    torch.nn.Module.to(model, kept.dtype)
    check_same_model({name: parameter.shape for name, parameter in model.named_parameters()}, kept.reader)
    model.config.use_cache = True
    return model


def write_language_model(model: PreTrainedModel, tokenizer_dir: Path, kept: Kept, folder: Path) -> None:
    """Write config.json, generation_config.json and weights as the library's `save_pretrained` does, and the tokenizer.

    Where the library does more than rename on the way to its files, it is given the whole model.
    """
    keys = names_on_disk(model)
    if keys is None:
        weights = {name: kept.weight(name) for name in kept.reader.names()}
        with _without_progress_bar():
            model.save_pretrained(folder, state_dict=weights)
    else:
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            assert model.generation_config is not None
            model.generation_config.save_pretrained(folder)
        names = {key: name for name, key in keys.items()}
        like = {key: model.get_parameter(name) for key, name in names.items()}
        write_shards(kept, names, like, folder, "model{suffix}.safetensors")
    shutil.copytree(tokenizer_dir, folder, dirs_exist_ok=True)


def _adopt_ends(config: PretrainedConfig, tokenizer_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if tokenizer.eos_token_id not in ends:
        config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id


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
