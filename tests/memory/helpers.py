from functools import cache

from fluxray.config.load import resolve
from fluxray.memory.plan import MemoryPlan
from fluxray.memory.spec import ModelSpec
from fluxray.runtime import planning

GIB = 2**30


@cache
def spec_of(model: str, *words: str) -> ModelSpec:
    of_no_matter = ["optim.master=fp32", "clip.mode=exact"]
    return planning.model_spec(resolve("a6000", model, [*words, *of_no_matter]))


def planned(model: str, *words: str, profile: str = "a6000") -> MemoryPlan:
    shape = [word for word in words if word.startswith(("data.", "model.", "precision=", "adapter."))]
    return planning.plan_run(resolve(profile, model, words), spec_of(model, *shape))
