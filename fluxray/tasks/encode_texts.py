"""Second pass of an encoding: captions become embeddings, and with the latents that wait for them, shards.

Stages as in `fluxray.tasks.encode_pictures`; a row without a shard is the empty caption.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fluxray.data.latent_shards import LatentSample, TextEmbedding, write_json, write_shard
from fluxray.models.encoders import TextEncoder
from fluxray.tasks.encode_pictures import (
    Row,
    read_told,
    synchronise,
    waiting_file,
    write_waiting,
)
from fluxray.tasks.encode_plan import LAYOUT, EncodeJob, Shard, read_tensors, samples_file

TEXT_TENSORS = ("text", "pooled")


class ReadCaptions:
    """Lists the captions of a shard that no finished shard has embedded."""

    def __init__(self, job: EncodeJob) -> None:
        self.job = job

    def __call__(self, row: Row) -> Row:
        """Return the row of a shard with its captions to embed, each once."""
        shard: Shard | None = row["shard"]
        captions = [""]
        if shard is not None:
            told = read_told(waiting_file(self.job, shard))
            missing = [
                of["caption"] for key, of in told["samples"].items() if not _known_text(self.job, shard, key, of["caption"])
            ]
            captions = list(dict.fromkeys(missing))
        return {"shard": shard, "captions": json.dumps(captions)}


class CaptionEncoder:
    """Embeds captions; the text encoders are loaded when the first come."""

    def __init__(self, job: EncodeJob) -> None:
        self.job, self._encoder, self._lock = job, None, threading.Lock()

    def __call__(self, row: Row) -> Row:
        """Return the row with the embeddings of its captions: bf16 as int16, `text` [N, L, E] and `pooled` [N, P]."""
        captions: list[str] = json.loads(row["captions"])
        with self._lock:
            texts, num_cut = self._embed(captions)
        arrays = {name: tensor.view(torch.int16).numpy() for name, tensor in texts.items()}
        return {"shard": row["shard"], "captions": json.dumps(list(zip(captions, num_cut, strict=True))), **arrays}

    def _embed(self, captions: Sequence[str]) -> tuple[dict[str, Tensor], list[int]]:
        """Return the embeddings on the host, and how many tokens of each caption are cut."""
        encoders = self.job.encoders
        shapes = {"text": (encoders.text_tokens, encoders.text_width), "pooled": (encoders.pooled_width or 0,)}
        on_device = self.job.device == "cuda"
        found = {
            name: torch.empty((len(captions), *shape), dtype=torch.bfloat16, pin_memory=on_device and len(captions) > 0)
            for name, shape in shapes.items()
        }
        num_cut: list[int] = []
        size = self.job.settings.batch_captions
        for start in range(0, len(captions), size):
            if self._encoder is None:
                self._encoder = TextEncoder(encoders, getattr(torch, self.job.dtype), torch.device(self.job.device))
            part = captions[start : start + size]
            texts = self._encoder.embed([*part, *[""] * (size - len(part))])  # one shape for all: a caption has one embedding
            for name, tensor in zip(found, texts, strict=True):
                if tensor is not None:
                    found[name][start : start + len(part)].copy_(tensor[: len(part)], non_blocking=True)
            num_cut += [self._encoder.num_cut(caption) for caption in part]
        synchronise(self.job)
        return found, num_cut


class WriteShard:
    """Writes a shard of latents and texts, and beside it what its samples were made of."""

    def __init__(self, job: EncodeJob) -> None:
        self.job = job

    def __call__(self, row: Row) -> Row:
        """Return how many pictures the shard has, and how many captions were embedded now."""
        job, shard = self.job, row["shard"]
        embedded = _embedded(row)
        if shard is None:
            write_waiting(empty_file(job), embedded[""][0], None)
            return {"num": 0, "num_encoded": 1}
        waiting = waiting_file(job, shard)
        told, latents = read_told(waiting), load_file(waiting)
        samples, left_out = [], list(told["left_out"])
        entries: dict[str, Any] = {}
        for key, of in sorted(told["samples"].items()):
            caption = of["caption"]
            found = embedded.get(caption) or _known_text(job, shard, key, caption)
            assert found is not None, "what is not known was embedded"
            text, tokens_cut = found
            if not all(tensor.isfinite().all() for tensor in text.values()):
                fault = {"reason": "text not finite", "detail": f"in {job.dtype}; set precision=fp32"}
                left_out.append({"name": of["name"], **fault})
                continue
            crop, made = of["crop"], latents[f"latents.{key}"]
            size, mask = (crop["height"], crop["width"]), latents.get(f"mask.{key}")
            samples.append(LatentSample(key, caption, *size, made, text["text"], text.get("pooled"), mask))
            entries[key] = {**of, "text": job.text_hash(caption), "tokens_cut": tokens_cut}
        left_out.sort(key=lambda one: one["name"])
        write_json(samples_file(job.cache, shard.stem), {"samples": entries, "left_out": left_out})
        if samples:
            write_shard(job.cache, shard.stem, job.facts, samples, LAYOUT)
        waiting.unlink()
        return {"num": len(shard.refs), "num_encoded": len(embedded)}


def empty_file(job: EncodeJob) -> Path:
    """Return the file in which the embedding of no caption waits."""
    return job.work_folder / f"empty-{job.text_identity[:12]}.safetensors"


def read_empty(job: EncodeJob) -> TextEmbedding:
    """Return the embedding of no caption."""
    tensors = load_file(empty_file(job))
    return TextEmbedding(tensors["text"], tensors.get("pooled"))


def _embedded(row: Row) -> dict[str, tuple[dict[str, Tensor], int]]:
    """Return the embedding of each caption that was embedded now, and how many of its tokens were cut."""
    found = {}
    for number, (caption, num_cut) in enumerate(json.loads(row["captions"])):
        arrays = {name: row[name][number] for name in TEXT_TENSORS if row[name].shape[-1]}
        found[caption] = ({name: torch.from_numpy(array.copy()).view(torch.bfloat16) for name, array in arrays.items()}, num_cut)
    return found


def _known_text(job: EncodeJob, shard: Shard, key: str, caption: str) -> tuple[dict[str, Tensor], int] | None:
    """Return the embedding of a caption that a finished shard has, and how many of its tokens are cut."""
    digest = job.text_hash(caption)
    for known in shard.known.get(key, ()):
        if known.text == digest and (found := read_tensors(job, known, key, TEXT_TENSORS)):
            return found, known.tokens_cut
    return None
