"""First pass of an encoding: pictures become latents, which wait in one file a shard for their texts.

Three stages follow one another, each from a row to a row, so that whoever runs them may give each its own processes:
`ReadPictures` and `WriteLatents` compute on the host, `PictureEncoder` on the device. A row holds the shard, what is told of its
pictures (JSON) and their tensors (the bytes of a safetensors file, as uint8 [N]).
"""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from fluxray.data.decode import Quarantined
from fluxray.data.latent_shards import commit
from fluxray.data.masks import token_mask
from fluxray.data.pictures import PictureRef
from fluxray.data.prepared import Prepared, prepare_picture
from fluxray.models.encoders import VaeEncoder
from fluxray.seeding import derive_seed
from fluxray.tasks.encode_plan import EncodeJob, Shard, read_tensors

Row = dict[str, Any]


class ReadPictures:
    """Decodes and crops the pictures of a shard; latents that a finished shard has of the same pixels are taken from there."""

    def __init__(self, job: EncodeJob) -> None:
        self.job = job

    def __call__(self, row: Row) -> Row:
        """Return the row of a shard: pixels uint8 [H, W, 3] or latents of each picture, its mask, and which are left out."""
        shard: Shard = row["shard"]
        tensors: dict[str, Tensor] = {}
        samples: dict[str, Any] = {}
        left_out: list[dict[str, str]] = []
        for ref, key in zip(shard.refs, shard.keys, strict=True):
            try:
                made = prepare_picture(self.job.pictures, ref, self.job.settings)
            except Quarantined as fault:
                left_out.append(_told(ref, fault))
                continue
            digest = self.job.picture_hash(key, made.pixels)
            samples[key] = _described(ref, made, digest)
            latents = _known_latents(self.job, shard, key, digest)
            if latents is None:
                tensors[f"pixels.{key}"] = torch.from_numpy(made.pixels)
            else:
                tensors[f"latents.{key}"] = latents
            if made.mask is not None:
                tensors[f"mask.{key}"] = token_mask(torch.from_numpy(made.mask) / 255, self.job.facts.pixels_per_token)
        return {"shard": shard, "told": json.dumps({"samples": samples, "left_out": left_out}), "tensors": as_bytes(tensors)}


class PictureEncoder:
    """Encodes the pixels of a shard; the VAE is loaded when the first come."""

    def __init__(self, job: EncodeJob) -> None:
        self.job, self._vae, self._lock = job, None, threading.Lock()

    def __call__(self, row: Row) -> Row:
        """Return the row with latents in the place of pixels; pictures whose latents are not finite are left out."""
        shard: Shard = row["shard"]
        told, tensors = json.loads(row["told"]), of_bytes(row["tensors"])
        pixels = {name.partition(".")[2]: tensors.pop(name) for name in list(tensors) if name.startswith("pixels.")}
        with self._lock:  # one shard at a time is on the device, while others come and go
            encoded = self._encode(pixels)
        names = dict(zip(shard.keys, shard.refs, strict=True))
        for key, latents in encoded.items():
            if latents.isfinite().all():
                tensors[f"latents.{key}"] = latents
            else:
                del told["samples"][key]
                fault = Quarantined("latents not finite", f"in {self.job.dtype}; set precision=fp32")
                told["left_out"].append(_told(names[key], fault))
        told["num_encoded"] = len(pixels)
        return {"shard": shard, "told": json.dumps(told), "tensors": as_bytes(tensors)}

    def _encode(self, pixels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not pixels:
            return {}
        if self._vae is None:
            self._vae = VaeEncoder(self.job.encoders, getattr(torch, self.job.dtype), torch.device(self.job.device))
        found = [
            (keys, to_host(self._vae.latents(torch.stack([pixels[key] for key in keys]), [posterior_seed(key) for key in keys])))
            for keys in _batches(pixels, self.job.settings.batch_pixels)
        ]
        synchronise(self.job)
        return {key: latents for keys, of_batch in found for key, latents in zip(keys, of_batch, strict=True)}


class WriteLatents:
    """Writes the latents of a shard where the second pass finds them."""

    def __init__(self, job: EncodeJob) -> None:
        self.job = job

    def __call__(self, row: Row) -> Row:
        """Return how many pictures the shard has, and how many of them were encoded now."""
        shard: Shard = row["shard"]
        told = json.loads(row["told"])
        write_waiting(waiting_file(self.job, shard), of_bytes(row["tensors"]), told)
        return {"num": len(shard.refs), "num_encoded": told["num_encoded"]}


def posterior_seed(key: str) -> int:
    """Return the seed by which FLUX.1 draws the latents of a sample."""
    return derive_seed("posterior", key)


def waiting_file(job: EncodeJob, shard: Shard) -> Path:
    """Return the file in which a shard's latents wait."""
    return job.work_folder / f"{shard.stem}.safetensors"


def write_waiting(path: Path, tensors: Mapping[str, Tensor], told: Any) -> None:
    """Write tensors and what is told of them into a file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    save_file(dict(tensors), partial, {"told": json.dumps(told)})
    commit(partial, path)


def read_told(path: Path) -> Any:
    """Return what `write_waiting` was told."""
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {})["told"])


def as_bytes(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Return tensors as the bytes of a safetensors file, uint8 [N]: what passes between processes without being pickled."""
    return np.frombuffer(save(dict(tensors)), np.uint8)


def of_bytes(data: np.ndarray) -> dict[str, Tensor]:
    """Undo `as_bytes`."""
    return load(data.tobytes())


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is complete after `synchronise`: the device goes on meanwhile."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def synchronise(job: EncodeJob) -> None:
    """Wait for what the device has been given."""
    if job.device == "cuda":
        torch.cuda.synchronize()


def _described(ref: PictureRef, made: Prepared, digest: str) -> dict[str, Any]:
    """Return what is told of a picture; `digest` is the hash of what decides its latents."""
    return {
        "name": ref.key,
        "caption": made.caption,
        "size": list(made.size),
        "crop": made.crop.to_json(),
        "notes": list(made.notes),
        "picture": digest,
    }


def _known_latents(job: EncodeJob, shard: Shard, key: str, digest: str) -> Tensor | None:
    for known in shard.known.get(key, ()):
        if known.picture == digest and (found := read_tensors(job, known, key, ("latents",))):
            return found["latents"]
    return None


def _batches(pixels: Mapping[str, Tensor], batch_pixels: int) -> Iterator[list[str]]:
    """Yield the keys of pictures of one size, as many as have `batch_pixels` together; at least one."""
    sizes: dict[tuple[int, ...], list[str]] = {}
    for key, picture in pixels.items():
        sizes.setdefault(tuple(picture.shape[:2]), []).append(key)
    for (height, width), keys in sorted(sizes.items()):
        number = max(batch_pixels // (height * width), 1)
        yield from (sorted(keys)[start : start + number] for start in range(0, len(keys), number))


def _told(ref: PictureRef, fault: Quarantined) -> dict[str, str]:
    return {"name": ref.key, "reason": fault.reason, "detail": fault.detail}
