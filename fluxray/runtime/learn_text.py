"""Language modelling as the worker runs it."""

import shutil
from pathlib import Path

import torch

from fluxray.checkpoint import MODEL_DIR, TOKENIZER_DIR
from fluxray.config.adapter import drops_inputs
from fluxray.config.schema import TrainConfig
from fluxray.data.loader import Loader
from fluxray.data.text import TextData, prepare_text
from fluxray.errors import ConfigError
from fluxray.memory.frozen import FrozenFlops
from fluxray.metrics import count_forward_flops
from fluxray.models.causal_lm import CausalLMStack, build_causal_lm, has_dropout, library_config
from fluxray.models.verify import check_stack
from fluxray.protocols import IGNORE_INDEX, TextBatch
from fluxray.ranks import Ranks
from fluxray.runtime.attention import choose_kernel, expected_kernel
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.learned import Learned
from fluxray.runtime.planned import refuse_misfit
from fluxray.runtime.planning import check_techniques
from fluxray.tasks.lm import LmTask, text_metrics


def preflight_text(config: TrainConfig, cache_dir: Path) -> None:
    """Do on the driver all that can be found wrong with data, tokenizer and model. Raises FluxrayError."""
    refuse_misfit(config)
    data = load_data(config, cache_dir)
    model_config = library_config(config.model, data.num_tokenizer_entries)
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is not None and config.data.max_slice > longest:
        raise ConfigError(
            f"data.max_slice: {config.data.max_slice} is over the model's max_position_embeddings {longest}; lower it"
        )
    expected_kernel(config, model_config)
    check_techniques(config, has_dropout(model_config) or drops_inputs(config.adapter))
    check_stack(model_config, fused_qkv=config.model.fused_qkv)
    build_causal_lm(config.model, config.seed, data.num_tokenizer_entries, adapter=config.adapter)


def load_data(config: TrainConfig, cache_dir: Path) -> TextData:
    """Return the rows of a run, tokenised once under `cache_dir`."""
    if config.model.weights is not None:
        vocab_size = library_config(config.model).vocab_size
    else:
        vocab_size = config.model.config.get("vocab_size")
    return prepare_text(config.data, cache_dir, config.model.weights, vocab_size)


def learn_text(config: TrainConfig, context: WorkerContext, ranks: Ranks, device: torch.device) -> Learned:
    """Load data and model. Collective over all ranks."""
    data = ranks.together(lambda: load_data(config, context.cache_dir))
    task = LmTask(data.pad_id, config.compile)
    model_config = library_config(config.model, data.num_tokenizer_entries)
    kernel = choose_kernel(config, model_config, device, context.notify if context.rank == 0 else None)
    stack = build_causal_lm(config.model, config.seed, data.num_tokenizer_entries, kernel, config.adapter)
    flops_per_token = _step_flops(stack, config.data.max_slice) / config.data.max_slice
    loader = Loader(data.train, task.prepare, config.batch, context.rank, context.num_ranks, config.data.length_grouping)

    def describe(run_dir: Path) -> None:
        stack.model.config.save_pretrained(run_dir / MODEL_DIR)
        shutil.copytree(data.tokenizer_dir, run_dir / TOKENIZER_DIR, dirs_exist_ok=True)

    return Learned(
        stack=stack,
        loss_fn=task.loss_fn,
        loader=loader,
        eval_batches=lambda: loader.eval_groups(data.evaluation, config.evaluation.max_rows),
        eval_metrics=text_metrics,
        flops_of=lambda batch: flops_per_token * batch.num_tokens,
        known=data.num_tokenizer_entries,
        summary=data.summary(),
        describe=describe,
    )


def _step_flops(stack: CausalLMStack, length: int) -> int:
    """Return the FLOPs of forward and backward of one row of `length` positions, by a stack that is still on the meta device."""
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    batch = TextBatch(tokens, tokens, tokens, torch.full_like(tokens, IGNORE_INDEX), single_document=True, num_valid=0)
    with FrozenFlops(stack.model) as frozen:
        forward_flops = count_forward_flops(lambda: stack(batch, lambda logits, _: logits))
    return 3 * forward_flops - frozen.count
