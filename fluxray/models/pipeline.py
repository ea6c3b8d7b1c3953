"""Published FLUX models: where a `model.weights` has its transformer, and what else the pipeline around it holds.

It names the folder of a whole pipeline (model_index.json), that of a transformer (config.json), either of them on the hub, or a
single file in the format of black-forest-labs, itself or by the folder that holds it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from fluxray.errors import ConfigError, one_line
from fluxray.models.bfl import FLUX1, FLUX2, bfl_config, bfl_layout, bfl_tensors, in_diffusers_names, shape_of
from fluxray.models.stored import Stored, metadata_of, tensors_in

INDEX, CONFIG, TRANSFORMER = "model_index.json", "config.json", "transformer"
WEIGHTS = "diffusion_pytorch_model.safetensors"
STORED_DTYPES = ("F32", "F16", "BF16")

T = TypeVar("T")


@dataclass(frozen=True)
class FluxFiles:
    """A published transformer. In a folder or on the hub (`root`) config.json lies in `folder`; a single file is `file`."""

    reference: str
    root: str
    folder: str | None
    config: Mapping[str, Any]
    file: str | None = None


@dataclass(frozen=True)
class PipelineFacts:
    """What a pipeline's own files say of the models around its transformer.

    `latent_channels` are the VAE's, before its positions are packed. FLUX.1 takes `latent_shift` off its latents and multiplies
    by `latent_scale`; FLUX.2 normalises by statistics that the VAE's weights hold under the names `batch_norm` (mean, variance),
    with `batch_norm_eps`. `text_encoders` and `tokenizers` map components to their classes; `scheduler`, `vae` hold their keys.
    """

    pipeline: str
    is_distilled: bool | None
    latent_channels: int
    latent_scale: float | None
    latent_shift: float | None
    batch_norm: tuple[str, str] | None
    batch_norm_eps: float | None
    text_encoders: Mapping[str, str]
    tokenizers: Mapping[str, str]
    scheduler: Mapping[str, Any]
    vae: Mapping[str, Any]


def holds_flux(reference: str) -> bool:
    """Return whether `path:PLACE` or `hf:NAME` names a FLUX pipeline, transformer or file; False for what cannot be read."""
    try:
        find_flux(reference)
    except ConfigError:
        return False
    return True


def flux_config(reference: str) -> dict[str, Any]:
    """Return diffusers' configuration of a published transformer, with `_class_name`.

    Raises ConfigError where the reference names none, or one that is quantised or damaged.
    """
    return dict(find_flux(reference).config)


def find_flux(reference: str) -> FluxFiles:
    """Return where a published transformer lies; see `flux_config`."""
    root = _root(reference)
    find = _in_file if root.endswith(".safetensors") else _in_folder
    return _guarded(reference, lambda: find(reference, root))


def pipeline_facts(reference: str) -> PipelineFacts | None:
    """Return what the pipeline's folder says, or None where `reference` names a transformer alone.

    Raises ConfigError for a reference that names nothing, and for files of a pipeline that are missing or damaged.
    """
    files = find_flux(reference)
    return _guarded(reference, lambda: _facts(files.root)) if _is_pipeline(files) else None


def pipeline_folder(reference: str) -> Path | None:
    """Return the folder of the whole pipeline, fetched from the hub but for its transformer; None for a transformer alone.

    Raises ConfigError for a reference that names nothing, and where one of the pipeline's components is missing.
    """
    files = find_flux(reference)
    if not _is_pipeline(files):
        return None
    folder = Path(files.root) if Path(files.root).is_absolute() else _guarded(reference, lambda: _fetched(files.root))
    for name in components(folder):
        if not (folder / name).is_dir():
            raise ConfigError(f"model.weights: {reference!r} lacks its folder {name}; complete the pipeline")
    return folder


def components(folder: Path) -> list[str]:
    """Return the folders of a pipeline's components but for its transformer."""
    index = _json(str(folder), INDEX) or {}
    return [name for name in _classes(index) if name != TRANSFORMER and Path(name).name == name]


def flux_tensors(reference: str, shapes: Mapping[str, Any]) -> dict[str, Stored]:
    """Return where each parameter of a transformer lies, by diffusers' names; their names and shapes must be exactly `shapes`.

    Raises ConfigError for other names, shapes or formats of numbers, and for files that are missing or damaged.
    """
    files = find_flux(reference)
    if files.file is None:
        stored = _guarded(reference, lambda: tensors_in(_weight_files(files)))
        _check(reference, stored, {name: tuple(shape) for name, shape in shapes.items()})
        return stored
    stored = bfl_tensors(_guarded(reference, lambda: tensors_in([str(files.file)])))
    assert stored is not None, "find_flux has looked"
    layout = bfl_layout(files.config["_class_name"], shapes)
    _check(reference, stored, {key: tuple(shape_of(parts, shapes)) for key, parts in layout.items()})
    return in_diffusers_names(stored, layout)


def _root(reference: str) -> str:
    """Return a folder, a file or a name on the hub."""
    scheme, _, rest = reference.partition(":")
    if scheme == "hf" and rest:
        return rest
    if scheme != "path" or not rest:
        raise ConfigError(f"model.weights: {reference!r} is neither path:PLACE nor hf:NAME")
    path = Path(rest).expanduser()
    if not path.is_dir() and not (path.is_file() and path.suffix == ".safetensors"):
        raise ConfigError(
            f"model.weights: {reference!r} is no folder and no .safetensors file; name a pipeline, a transformer or a single file"
        )
    return str(path.resolve())


def _in_folder(reference: str, root: str) -> FluxFiles:
    index = _json(root, INDEX)
    if index is not None:
        transformer = (index.get(TRANSFORMER) or [None, None])[1]
        if transformer not in (FLUX1, FLUX2):
            raise ConfigError(
                f"model.weights: {reference!r} is a {index.get('_class_name')} without a FLUX transformer; name another one"
            )
    for folder in (TRANSFORMER, "") if index is None else (TRANSFORMER,):
        config = _json(root, f"{folder}/{CONFIG}" if folder else CONFIG)
        if config is not None and config.get("_class_name") in (FLUX1, FLUX2):
            if config.get("quantization_config") is not None:
                raise ConfigError(f"model.weights: {reference!r} is quantised; name the model in bf16 or fp32")
            return FluxFiles(reference, root, folder, config)
    if index is not None:
        raise ConfigError(f"model.weights: {reference!r} lacks {TRANSFORMER}/{CONFIG} of a FLUX model; check that it is complete")
    files = sorted(Path(root).glob("*.safetensors")) if Path(root).is_absolute() else []
    singles = [file for file in files if bfl_tensors(tensors_in([str(file)])) is not None]
    if len(singles) > 1:
        raise ConfigError(
            f"model.weights: {reference!r} holds {singles[0].name} and {singles[1].name}; name one of these files with path:"
        )
    if reference.startswith("hf:"):
        raise ConfigError(f"model.weights: {reference!r} holds no FLUX model; check the name, the network and your access to it")
    if not singles:
        raise ConfigError(
            f"model.weights: {reference!r} holds no FLUX model; name a pipeline, its transformer or a single .safetensors file"
        )
    return _in_file(reference, str(singles[0]))


def _in_file(reference: str, file: str) -> FluxFiles:
    stored = bfl_tensors(tensors_in([file]))
    if stored is None:
        raise ConfigError(f"model.weights: {reference!r} is no single file of a FLUX transformer; name one, or a model's folder")
    _check_dtypes(reference, stored)
    try:
        config = bfl_config(stored, metadata_of(file))
    except KeyError as error:
        raise ConfigError(f"model.weights: {reference!r} lacks {error.args[0]}; it is of another model") from None
    return FluxFiles(reference, file, None, config, file)


def _is_pipeline(files: FluxFiles) -> bool:
    return files.folder == TRANSFORMER and _json(files.root, INDEX) is not None


def _facts(root: str) -> PipelineFacts:
    index = _json(root, INDEX)
    assert index is not None, "it was there"
    parts = _classes(index)
    vae, scheduler = _json(root, f"vae/{CONFIG}"), _json(root, "scheduler/scheduler_config.json")
    if vae is None or scheduler is None:
        raise FileNotFoundError(f"vae/{CONFIG} is missing" if vae is None else "scheduler/scheduler_config.json is missing")
    eps = vae.get("batch_norm_eps")
    return PipelineFacts(
        pipeline=index["_class_name"],
        is_distilled=index.get("is_distilled"),
        latent_channels=vae["latent_channels"],
        latent_scale=vae.get("scaling_factor") if eps is None else None,
        latent_shift=vae.get("shift_factor") if eps is None else None,
        batch_norm=None if eps is None else ("bn.running_mean", "bn.running_var"),
        batch_norm_eps=eps,
        text_encoders={name: part for name, part in parts.items() if name.startswith("text_encoder")},
        tokenizers={name: part for name, part in parts.items() if name.startswith("tokenizer")},
        scheduler={key: value for key, value in scheduler.items() if not key.startswith("_")},
        vae=vae,
    )


def _classes(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes of the components that a model_index.json lists."""
    return {name: part[1] for name, part in index.items() if isinstance(part, list) and len(part) == 2 and part[1]}


def _fetched(name: str) -> Path:
    left_out = [f"{TRANSFORMER}/*", "*.bin", "*.onnx", "*.msgpack"]
    return Path(snapshot_download(name, allow_patterns=["*/*", INDEX, "LICENSE*"], ignore_patterns=left_out))


def _weight_files(files: FluxFiles) -> list[str]:
    within = f"{files.folder}/" if files.folder else ""
    whole = _file(files.root, f"{within}{WEIGHTS}")
    if whole is not None:
        return [whole]
    index = _file(files.root, f"{within}{WEIGHTS}.index.json")
    if index is None:
        raise FileNotFoundError(f"{within}{WEIGHTS} is missing")
    return get_checkpoint_shard_files(files.root, index, subfolder=files.folder or "")[0] or []


def _check(reference: str, stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]) -> None:
    _check_dtypes(reference, stored)
    missing, unknown = sorted(set(shapes) - set(stored)), sorted(set(stored) - set(shapes))
    for what, names in (("lacks", missing), ("has, beyond its configuration,", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"model.weights: {reference!r} {what} {names[0]}{more}; it is of another model")
    for name, shape in sorted(shapes.items()):
        if tuple(stored[name].shape) != shape:
            raise ConfigError(
                f"model.weights: {reference!r} cannot be loaded ({name} is {list(stored[name].shape)} in its files, "
                f"{list(shape)} by its configuration); take both from one model"
            )


def _check_dtypes(reference: str, stored: Mapping[str, Stored]) -> None:
    for name, tensor in sorted(stored.items()):
        if tensor.dtype not in STORED_DTYPES:
            raise ConfigError(f"model.weights: {reference!r} has {name} as {tensor.dtype}; name the model in bf16 or fp32")


def _file(root: str, name: str) -> str | None:
    """Return the path of a file of a folder or of a name on the hub, fetched where it is not here; None if there is none."""
    try:
        return cached_file(root, name)
    except OSError:  # of the hub, too, it is the answer that there is no such file
        return None


def _json(root: str, name: str) -> dict[str, Any] | None:
    path = _file(root, name)
    if path is None:
        return None
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no keys")
    return found


def _guarded(reference: str, action: Callable[[], T]) -> T:
    """Run what reads published files; what these are not fit for becomes one line."""
    try:
        return action()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, SafetensorError) as error:
        remedy = "check the name and the network" if reference.startswith("hf:") else "check that its files are complete"
        raise ConfigError(f"model.weights: {reference!r} cannot be loaded ({one_line(error)}); {remedy}") from None
