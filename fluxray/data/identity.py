"""Which VAE and text encoders belong to a model: the parts of its pipeline, known again by hashes of their weights."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fluxray.data.latent_facts import CacheNeeds
from fluxray.errors import DataError

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")


def with_pipeline(needs: CacheNeeds, folder: Path, config_key: str = "model.weights") -> CacheNeeds:
    """Return `needs` with the VAE and the text encoders of the pipeline in `folder`, as far as they are there.

    A folder that holds the transformer alone adds nothing. `config_key` is what errors name. Raises DataError for damaged parts.
    """
    vae = folder / "vae"
    if (statistics := _scaling(vae / "config.json", config_key)) is not None:
        needs = replace(needs, latent_statistics=statistics)
    present = {name for name in ("vae", *TEXT_ENCODERS) if any((folder / name).glob("*.safetensors"))}
    encoders = {name: weights_identity(folder / name, config_key) for name in TEXT_ENCODERS if name in present}
    return replace(needs, vae=weights_identity(vae, config_key) if "vae" in present else None, text_encoders=encoders)


def _scaling(config: Path, config_key: str) -> dict[str, tuple[float, ...]] | None:
    """Return what FLUX.1's latents are normalised by; None where it is not in the VAE's config, but, FLUX.2's, in its weights."""
    try:
        values = json.loads(config.read_text())
        if values.get("shift_factor") is None:
            return None
        return {"shift": (float(values["shift_factor"]),), "scale": (float(values["scaling_factor"]),)}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{config_key}: {config} is damaged; copy it again") from None


def weights_identity(folder: Path, config_key: str) -> str:
    """Return a hash of the model in a folder of diffusers or transformers: 16 hex digits.

    Of each tensor it reads name, shape and the first row, as bf16: that takes no time, and a copy in another dtype or cut into
    other files has the same. `config_key` is what errors name. Raises DataError where there are no safetensors files, or damaged
    ones.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        for name, path in sorted(_tensor_files(folder, config_key).items()):
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(name)
                shape = part.get_shape()
                first = part[:1] if shape else file.get_tensor(name)
            digest.update(repr((name, list(shape))).encode())
            digest.update(first.to(torch.bfloat16).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    except (OSError, SafetensorError, ValueError, KeyError):
        raise DataError(f"{config_key}: the weights in {folder} are damaged; copy them again") from None
    return digest.hexdigest()


def _tensor_files(folder: Path, config_key: str) -> dict[str, Path]:
    """Return the file of each tensor: by the index that the libraries write, else of the only file."""
    indexes = [path for path in folder.glob("*.safetensors.index.json") if path.name.count(".") == 3]
    if indexes:
        return {name: folder / file for name, file in json.loads(indexes[0].read_text())["weight_map"].items()}
    files = [path for path in folder.glob("*.safetensors") if path.name.count(".") == 1]  # model.fp16.safetensors is a variant
    if len(files) != 1:
        raise DataError(f"{config_key}: {folder} has {len(files)} safetensors files and no index; name a folder of one model")
    with safe_open(files[0], framework="pt") as file:
        return dict.fromkeys(file.keys(), files[0])
