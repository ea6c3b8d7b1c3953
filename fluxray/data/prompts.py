"""Prompts with their embeddings: of captions in caches, and of files that hold nothing else.

Such a file is safetensors: `0.text` [L, E] and, for FLUX.1, `0.pooled` [P] of each prompt by its number, `empty.text` and
`empty.pooled` of no caption, and the captions as JSON in its metadata.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxray.data.latent_shards import TextEmbedding
from fluxray.data.latents import LatentRows
from fluxray.errors import ConfigError, DataError

CAPTIONS = "captions"
SEEN = 8
"""Rows that are looked at for each caption by default: a caption may come several times."""

EMBED = "make a file of embeddings with `fluxray sample --embed FILE` and set sample.embeddings=FILE"


class Prompt(NamedTuple):
    """A caption and its embedding."""

    caption: str
    embedding: TextEmbedding


class PromptSet(NamedTuple):
    """Prompts, and the embedding of no caption at each text length."""

    prompts: Sequence[Prompt]
    empty: Mapping[int, TextEmbedding]


def write_prompts(path: Path, found: PromptSet) -> None:
    """Write prompts whose texts have one length, and the empty one of that length. Raises DataError where that cannot be."""
    (empty,) = found.empty.values()
    named = {**{str(n): prompt.embedding for n, prompt in enumerate(found.prompts)}, "empty": empty}
    tensors: dict[str, Tensor] = {}
    for name, embedding in named.items():
        tensors[f"{name}.text"] = embedding.text.detach().cpu().contiguous().clone()
        if embedding.pooled is not None:
            tensors[f"{name}.pooled"] = embedding.pooled.detach().cpu().contiguous().clone()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={CAPTIONS: json.dumps([prompt.caption for prompt in found.prompts])})
    except (OSError, SafetensorError) as error:
        raise DataError(f"--embed: {path} cannot be written ({error}); name another file") from None


def read_prompts(path: Path, text_width: int, pooled_width: int | None) -> PromptSet:
    """Return what `write_prompts` wrote. Raises DataError for another file, ConfigError for embeddings of other widths."""
    try:
        with safe_open(path, framework="pt") as file:
            captions = json.loads((file.metadata() or {})[CAPTIONS])
            names = set(file.keys())

            def embedding(name: str) -> TextEmbedding:
                pooled = f"{name}.pooled"
                return TextEmbedding(file.get_tensor(f"{name}.text"), file.get_tensor(pooled) if pooled in names else None)

            empty = embedding("empty")
            prompts = [Prompt(caption, embedding(str(number))) for number, caption in enumerate(captions)]
    except (OSError, SafetensorError, KeyError, ValueError):
        raise DataError(f"sample.embeddings: {path} is no file of prompts; {EMBED}") from None
    for _, (text, pooled) in (*prompts, Prompt("", empty)):
        if text.shape[1:] != (text_width,) or (None if pooled is None else len(pooled)) != pooled_width:
            raise ConfigError(f"sample.embeddings: {path} is of other text encoders than the model's; {EMBED}")
    return PromptSet(prompts, {len(empty.text): empty})


def chosen(found: PromptSet, captions: Sequence[str] | None) -> PromptSet:
    """Return the prompts with these captions, in their order; all of them for None."""
    if captions is None:
        return found
    by_caption = {prompt.caption: prompt for prompt in found.prompts}
    return PromptSet([_found(by_caption.get(caption), caption) for caption in captions], found.empty)


def prompts_of_caches(parts: Sequence[LatentRows], captions: Sequence[str] | None, number: int) -> PromptSet:
    """Return the prompts with these captions from rows of caches, in order; for None, the first `number` of the last rows."""
    empty = parts[0].cache.empty
    if captions is None:
        different = {caption: (rows, row) for caption, rows, row in _captions(parts[-1:], SEEN * number)}
        places = list(different.items())[:number]
        return PromptSet([_prompt(caption, *place) for caption, place in places], empty)
    known: dict[str, tuple[LatentRows, int]] = {}
    for caption, rows, row in _captions(parts):
        known.setdefault(caption, (rows, row))
    found = [_prompt(caption, *known[caption]) if caption in known else None for caption in captions]
    return PromptSet([_found(prompt, caption) for prompt, caption in zip(found, captions, strict=True)], empty)


def _captions(parts: Sequence[LatentRows], most: int | None = None) -> Iterator[tuple[str, LatentRows, int]]:
    return ((rows.cache.caption(int(index)), rows, row) for rows in parts for row, index in enumerate(rows.indexes[:most]))


def _prompt(caption: str, rows: LatentRows, row: int) -> Prompt:
    read = rows[row]
    return Prompt(caption, TextEmbedding(read.text, read.pooled))


def _found(prompt: Prompt | None, caption: str) -> Prompt:
    if prompt is None:
        raise ConfigError(f"sample.prompts: {caption!r} is no caption whose embedding is there; {EMBED}")
    return prompt
