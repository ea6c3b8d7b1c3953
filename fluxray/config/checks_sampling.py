"""What pictures while training ask of the other keys."""

from fluxray.config.encode import PIXELS_PER_TOKEN
from fluxray.config.sampling import EmaConfig, SampleConfig
from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError


def check_sampling(config: TrainConfig) -> None:
    """Raise ConfigError for the first key of `sample` or `ema` that contradicts another one."""
    sample = config.sample
    if not config.ema.decay and config.ema.dtype != EmaConfig().dtype:
        raise ConfigError(f"ema.dtype: {config.ema.dtype!r} has no effect without ema.decay; set it, such as 0.999, or drop it")
    if sample.every_steps == 0:
        if sample != SampleConfig():
            raise ConfigError("sample.every_steps: 0, so the other keys of sample have no effect; set it, or drop them")
        return
    if config.task.kind != "flow":
        raise ConfigError(f"sample.every_steps: {sample.every_steps}, but task.kind is {config.task.kind}; drop it")
    if sample.pipeline is None and config.model.weights is None:
        raise ConfigError(
            "sample.pipeline: null, but model.weights names no pipeline whose VAE could decode; set sample.pipeline=path:FOLDER"
        )
    if sample.weights == "ema" and not config.ema.decay:
        raise ConfigError("sample.weights: 'ema', but no average is kept; set ema.decay=0.999, or sample.weights=trained")
    if (sample.height is None) != (sample.width is None):
        raise ConfigError("sample.height: set it together with sample.width, or neither")
    for key in ("height", "width"):
        value = getattr(sample, key)
        if value is not None and value % PIXELS_PER_TOKEN:
            below = value - value % PIXELS_PER_TOKEN
            raise ConfigError(
                f"sample.{key}: {value} is not a multiple of {PIXELS_PER_TOKEN}, the pixels of a token; use {below} or "
                f"{below + PIXELS_PER_TOKEN}"
            )
    if sample.prompts is not None and (not sample.prompts or len(set(sample.prompts)) < len(sample.prompts)):
        raise ConfigError("sample.prompts: name some, each once, or drop the key")
    if len(set(sample.seeds)) < len(sample.seeds):
        raise ConfigError("sample.seeds: name each once")
