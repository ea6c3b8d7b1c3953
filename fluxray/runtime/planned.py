"""A worker's plan: made before anything is allocated, obeyed by the stream engine, told to the user, kept beside the run."""

from collections.abc import Callable

import torch

from fluxray.config.schema import TrainConfig
from fluxray.errors import PlanError
from fluxray.memory.plan import MemoryPlan
from fluxray.memory.table import summary
from fluxray.runtime.hostmemory import require_room
from fluxray.runtime.planning import is_complete, model_spec, plan_run, require_fit

PLAN_FILE = "plan.txt"


def refuse_misfit(config: TrainConfig) -> None:
    """Raise PlanError on the driver if a streamed run does not fit hardware of which every figure is given."""
    if config.engine.kind == "stream" and is_complete(config):
        require_fit(config, plan_run(config))


def plan_worker(config: TrainConfig, num_tokenizer_entries: int, rank: int, notify: Callable[[str], None]) -> MemoryPlan | None:
    """Return the plan of this worker, and tell it in two lines. Raises PlanError where a streamed model does not fit.

    What is sharded is planned for by rank 0 and on GPUs only, and trained even if the plan says that it does not fit: it is an
    upper bound.
    """
    if config.engine.kind == "stream":
        found = plan_run(config, model_spec(config, num_tokenizer_entries))
        require_fit(config, found)
        require_room(found)
    elif config.resources.gpu > 0 and rank == 0:
        found = plan_run(config, model_spec(config, num_tokenizer_entries))
        try:
            require_fit(config, found)
        except PlanError as error:
            notify(f"{error}; trying it all the same")
    else:
        return None
    if config.resources.gpu > 0:  # what probes have taken is not the run's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for line in summary(found):
        notify(line)
    return found
