"""Learning-rate schedules: linear warm-up, then constant, linear or cosine."""

import math

from fluxray.config.schema import OptimConfig
from fluxray.protocols import Schedule


def build_schedule(config: OptimConfig, num_steps: int) -> Schedule:
    """Return the schedule of a run of `num_steps` optimizer steps."""
    return Schedule(config.schedule, config.lr, config.warmup_steps, num_steps, config.min_lr_ratio)


def lr_at(schedule: Schedule, step: int) -> float:
    """Return the learning rate of the optimizer step that follows `step` finished ones.

    Warm-up rises linearly and reaches the peak with its last step. Linear and cosine then fall to `min_ratio` x peak, which the
    step after the last would have.
    """
    if step < schedule.warmup_steps:
        return schedule.peak_lr * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return schedule.peak_lr
    done = min(1.0, (step - schedule.warmup_steps) / max(1, schedule.total_steps - schedule.warmup_steps))
    remaining = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.peak_lr * (schedule.min_ratio + (1.0 - schedule.min_ratio) * remaining)
