"""What a kind of task brings to a run on one rank: `learn_text` and `learn_images` make it, `worker` puts it to work."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxray.data.loader import Loader
from fluxray.protocols import Batch, BlockStack, LossFn
from fluxray.runtime.pictures import Sampling
from fluxray.runtime.stacks import Known
from fluxray.trainer import EvalMetrics


@dataclass(frozen=True)
class Learned:
    """Model, batches and loss of a run.

    `stack` is on the meta device. `eval_batches` and `eval_metrics` are the trainer's hooks, as are `first_loss` and `terms`.
    `flops_of` counts the FLOPs of a batch's forward and backward. `known` is what plans want to know of the rows; `summary` tells
    of them in one line, `warnings` of what is not as it should be. `describe` writes into a run's folder what evaluation and
    export need beside checkpoints. `sampling` is what pictures are made of while training.
    """

    stack: BlockStack
    loss_fn: LossFn
    loader: Loader
    eval_batches: Callable[[], Iterable[Sequence[Batch]]]
    eval_metrics: EvalMetrics
    flops_of: Callable[[Batch], float]
    known: Known
    summary: str
    describe: Callable[[Path], None]
    terms: str = "tokens"
    first_loss: Callable[[Sequence[Batch], float], None] | None = None
    sampling: Sampling | None = None
    warnings: Sequence[str] = ()
