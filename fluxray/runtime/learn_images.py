"""Flow matching as the worker runs it."""

from collections.abc import Callable

import numpy as np
import torch

from fluxray.checkpoint import MODEL_DIR
from fluxray.config.adapter import drops_inputs
from fluxray.config.schema import FlowTaskConfig, TrainConfig
from fluxray.data.loader import Loader
from fluxray.data.prior import RowsWithPrior
from fluxray.memory.frozen import FrozenFlops
from fluxray.metrics import count_forward_flops
from fluxray.models.flux_facts import FluxFacts, flux_facts
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.models.flux_verify import check_flux_stack
from fluxray.protocols import Batch, FlowBatch
from fluxray.ranks import Ranks
from fluxray.runtime.attention import choose_kernel, expected_kernel
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.images import Size, check_steps, load_images, needs_of, sizes_of, with_published
from fluxray.runtime.learned import Learned
from fluxray.runtime.paths import write_text
from fluxray.runtime.pictures import check_decoder, plan_sampling
from fluxray.runtime.planned import refuse_misfit
from fluxray.runtime.planning import check_techniques
from fluxray.runtime.stacks import images
from fluxray.tasks.flow import FlowTask
from fluxray.tasks.flow_gate import FirstLossGate, distilled_warning
from fluxray.tasks.validation import FlowValidation, flow_metrics

META = torch.device("meta")

COUNTED = (Size(2, 2, 4), Size(4, 2, 4), Size(2, 2, 8), Size(4, 2, 8))
"""Sizes of the images whose FLOPs are counted: as many as `flops_of_images` has terms."""


def preflight_images(config: TrainConfig) -> None:
    """Do on the driver all that can be found wrong with caches, published weights and model. Raises FluxrayError."""
    facts = flux_facts(config.model)
    task = _flow(config)
    data = load_images(config.data, with_published(needs_of(facts), config.model.weights), task.masked_loss)
    check_steps(config, sizes_of(*data).num_buckets)
    FlowTask(task, facts, data.empty, config.compile)
    expected_kernel(config, facts)
    check_techniques(config, drops_inputs(config.adapter))
    refuse_misfit(config)
    check_flux_stack(config.model)
    sampling = plan_sampling(config, facts, data)
    if sampling is not None:
        check_decoder(sampling, data)
    build_flux(config.model, config.seed, adapter=config.adapter)


def learn_images(config: TrainConfig, context: WorkerContext, ranks: Ranks, device: torch.device) -> Learned:
    """Load data and model. Collective over all ranks."""
    flow = _flow(config)
    facts = ranks.together(lambda: flux_facts(config.model))
    data = ranks.together(lambda: load_images(config.data, needs_of(facts), flow.masked_loss))
    sizes = sizes_of(*data)
    check_steps(config, sizes.num_buckets)
    task = FlowTask(flow, facts, data.empty, config.compile)
    kernel = choose_kernel(config, facts, device, context.notify if context.rank == 0 else None, sizes.largest.tokens)
    stack = build_flux(config.model, config.seed, kernel, adapter=config.adapter)
    rows = data.train if data.prior is None else RowsWithPrior(data.train, data.prior, flow.prior_weight)
    num_prior = 0 if data.prior is None else len(data.prior)
    readers = max(part.cache.folder.readers for part in data if part is not None)
    loader = Loader(rows, task.prepare, config.batch, context.rank, context.num_ranks, num_prior=num_prior, num_readers=readers)
    validation = FlowValidation(task, loader, data.evaluation, config.evaluation.max_rows)
    policy = flow.first_loss
    gate = None if policy == "off" else FirstLossGate(policy, config.model.weights is not None, ranks.gather, context.notify)
    sampling = ranks.together(lambda: plan_sampling(config, facts, data))
    warning = distilled_warning(facts, config.model.weights)
    keys = stack.model.to_json_string()  # before an engine changes the model's class

    return Learned(
        stack=stack,
        loss_fn=task.loss_fn,
        loader=loader,
        eval_batches=validation.groups,
        eval_metrics=flow_metrics,
        flops_of=flops_of_images(stack, facts),
        known=sizes,
        summary=data.summary(),
        describe=lambda run_dir: write_text(run_dir / MODEL_DIR / "config.json", keys),
        terms="images",
        first_loss=gate,
        sampling=sampling,
        warnings=() if warning is None else (warning,),
    )


def flops_of_images(stack: FluxStack, facts: FluxFacts) -> Callable[[Batch], float]:
    """Return what counts the FLOPs of a batch's forward and backward, by a stack on the meta device.

    With T tokens of the image and L of the text an image takes a + b T + c L + d (T + L)^2: modulation by noise level, what
    belongs to each token, attention. Four counts give the four numbers.
    """
    counts = [_step_flops(stack, images(facts, size, 1, META)) for size in COUNTED]
    found = np.linalg.solve(np.array([_terms(size) for size in COUNTED], dtype=np.float64), np.array(counts, dtype=np.float64))

    def flops_of(batch: Batch) -> float:
        assert isinstance(batch, FlowBatch)
        size = Size(batch.height, batch.width, batch.text.shape[1])
        return len(batch.noised) * float(np.dot(_terms(size), found))

    return flops_of


def _step_flops(stack: FluxStack, batch: FlowBatch) -> int:
    with FrozenFlops(stack.model) as frozen:
        forward_flops = count_forward_flops(lambda: stack(batch, lambda output, _: output))
    return 3 * forward_flops - frozen.count


def _terms(size: Size) -> tuple[int, int, int, int]:
    return 1, size.height * size.width, size.text_tokens, size.tokens**2


def _flow(config: TrainConfig) -> FlowTaskConfig:
    assert isinstance(config.task, FlowTaskConfig)
    return config.task
