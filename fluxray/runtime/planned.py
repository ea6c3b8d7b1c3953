"""A worker's plan: made before anything is allocated, obeyed by the stream engine, told to the user, kept beside the run."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from fluxray.config.schema import TrainConfig
from fluxray.errors import PlanError
from fluxray.memory.plan import MemoryPlan
from fluxray.memory.table import summary
from fluxray.runtime.figures import is_complete
from fluxray.runtime.hostmemory import require_room
from fluxray.runtime.paths import write_text
from fluxray.runtime.planning import model_spec, plan_run, require_fit
from fluxray.runtime.stacks import Known

PLAN_FILE = "plan.txt"
POLICY_FILE = "policy.json"
"""What was decided when the run began: it goes on so, whatever a probe says today, since some of it shows in the last bits."""


def refuse_misfit(config: TrainConfig) -> None:
    """Raise PlanError on the driver if a streamed run does not fit hardware of which every figure is given."""
    if config.engine.kind == "stream" and is_complete(config):
        require_fit(config, plan_run(config))


def plan_worker(config: TrainConfig, known: Known, rank: int, notify: Callable[[str], None], run_dir: Path) -> MemoryPlan | None:
    """Return the plan of this worker, and tell it in two lines. Raises PlanError where a streamed model does not fit.

    A streamed run that goes on keeps what was decided for it, unless that no longer fits.
    What is sharded is planned for by rank 0 and on GPUs only, and trained even if the plan says that it does not fit: it is an
    upper bound.
    """
    if config.engine.kind == "stream":
        spec = model_spec(config, known)
        found = plan_run(_as_before(config, run_dir), spec, known)
        if found.shortfalls:
            found = plan_run(config, spec, known)
        require_fit(config, found)
        require_room(found)
        write_text(run_dir / POLICY_FILE, json.dumps(asdict(found.policy)))
    elif config.resources.gpu > 0 and rank == 0:
        spec, before = model_spec(config, known), _as_before(config, run_dir)
        found = plan_run(before, spec, known)
        if found.shortfalls and before != config:
            found = plan_run(config, spec, known)
        if config.activation_checkpoint == "selective":
            write_text(run_dir / POLICY_FILE, json.dumps(asdict(found.policy)))
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


def _as_before(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """Return the configuration with what it leaves open of the engine as it was decided before, if it was."""
    try:
        policy = json.loads((run_dir / POLICY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return config
    if config.activation_checkpoint == "selective" and config.activation_checkpoint_budget is None:
        config = config.model_copy(update={"activation_checkpoint_budget": policy.get("checkpoint_budget")})
    if config.engine.kind == "sharded":
        return config
    open_keys = {key: policy[key] for key in ("resident_blocks", "kept_blocks") if key in policy}
    engine = config.engine.model_copy(
        update={key: value for key, value in open_keys.items() if getattr(config.engine, key) is None}
    )
    chunk = config.loss.chunk_tokens or (policy.get("epilogue_tokens") if config.task.kind == "lm" else None)
    return config.model_copy(update={"engine": engine, "loss": config.loss.model_copy(update={"chunk_tokens": chunk})})
