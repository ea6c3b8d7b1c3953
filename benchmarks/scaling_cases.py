"""What `scaling.py` measures: a row's model, how much a GPU gets of it, and its configuration on any number of GPUs."""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

SEQUENCE = 2048
NO_DROPOUT = ("model.config.attention_probs_dropout_prob=0", "model.config.hidden_dropout_prob=0")
OFFLOADED = "engine.cpu_offload=true"
SIXTEEN = 16
"""Images or rows of a global batch whose losses are compared."""


class Case(NamedTuple):
    """A row: what it is for, its model, rows of one micro-batch a GPU, pixels a side (0: text), more words.

    `speed` gives every GPU the same, `losses` shares the same global batches of SIXTEEN among all GPUs, `save` measures a
    checkpoint and what goes on from it, `kill` the loss of a worker.
    """

    purpose: str
    model: str
    micro_size: int
    side: int = 0
    words: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    "flux1-dev, 512 px": Case("speed", "flux1-dev", 16, 512),
    "flux1-dev, 1024 px": Case("speed", "flux1-dev", 4, 1024),
    "flux1-dev, 512 px, everything computed again": Case("speed", "flux1-dev", 16, 512, ("activation_checkpoint=full",)),
    "flux1-dev, 512 px, 40 GB a GPU": Case("speed", "flux1-dev", 4, 512, ("hardware.device_memory=40GB",)),
    "flux2-seed": Case("speed", "flux2-seed", 8, words=("activation_checkpoint=none",)),
    "neox-20b": Case("speed", "neox-20b", 4, words=("activation_checkpoint=selective",)),
    "flux1-dev, 512 px, cpu_offload": Case("speed", "flux1-dev", 16, 512, (OFFLOADED,)),
    "flux1-dev, 512 px, cpu_offload, twice the batch": Case("speed", "flux1-dev", 32, 512, (OFFLOADED,)),
    "flux2-seed, first losses": Case("losses", "flux2-seed", 0, words=NO_DROPOUT),
    "flux1-dev, 512 px, first losses": Case("losses", "flux1-dev", 0, 512),
    "flux1-dev, 512 px, a checkpoint": Case("save", "flux1-dev", 0, 512),
    "flux2-seed, a worker killed": Case("kill", "flux2-seed", 0),
}
"""Each row by what it is."""

STREAMED = ("engine.kind=stream", "optim.kind=adam8bit", "optim.master=split24", "clip.mode=exact", "activation_checkpoint=full")
"""What makes one GPU go on from a group's checkpoint; moments are rounded."""

TINY = {"flux1-dev": "flux1-tiny", "flux2-seed": "lm-tiny", "neox-20b": "lm-tiny"}
"""Models of a rehearsal on the CPU."""


def resolved(case: Case, num_gpus: int, folder: Path, rehearses: bool, more: list[str]) -> Any:
    """Return the configuration of a row on `num_gpus`, whose data is in `folder`; for a rehearsal, of a tiny model on the CPU."""
    from fluxray.config.load import resolve

    if case.purpose == "speed":
        micro_size, steps = (2 if rehearses else case.micro_size), 1
    else:
        micro_size = min(2, SIXTEEN // num_gpus)
        steps = SIXTEEN // (micro_size * num_gpus)
    words = [f"resources.num_workers={num_gpus}", f"batch.micro_size={micro_size}", f"batch.accumulation_steps={steps}"]
    words += ["optim.warmup_steps=0", "optim.lr=1e-5"]
    if case.side:
        words += [f"data.cache={folder / 'cache'}", "task.first_loss=off"]
    else:
        words += [f"data.source=path:{folder / 'one.txt'}", "data.vocab_size=8192", "data.packing=false"]
        words += ["data.vocab_size=512", "data.max_slice=64"] if rehearses else [f"data.max_slice={SEQUENCE}"]
    if not rehearses:
        return resolve("fsdp8", case.model, [*words, *case.words, *more])
    small = [word for word in case.words if not word.startswith(("model.", "hardware."))]
    figures = ["hardware.tflops=1", "hardware.link=1GB/s", "hardware.memory_bandwidth=1GB/s"]
    return resolve("cpu", TINY[case.model], [*words, *figures, *small, *more])


def write_data(case: Case, config: Any, folder: Path, rehearses: bool) -> None:
    """Write what a row trains on: a text, or random latents and embeddings of as many pictures as two global batches."""
    if not case.side:
        (folder / "one.txt").write_text("\n".join(topics.values()))
        return
    from flow import REHEARSED, write_random_cache

    side = case.side // REHEARSED if rehearses else case.side
    write_random_cache(folder / "cache", config, ((side, side),))


def main() -> None:
    """Write a row's data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row")
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_gpus", type=int)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    case = CASES[given.row]
    write_data(case, resolved(case, given.num_gpus, given.folder, given.rehearse, []), given.folder, given.rehearse)


if __name__ == "__main__":
    main()
