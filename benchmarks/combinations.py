"""What goes with what: every pair of techniques, refused with the reason or to be run. Writes docs/combinations.md.

python benchmarks/combinations.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from fluxray.config.load import resolve
from fluxray.errors import ConfigError

DOCUMENT = Path(__file__).parents[1] / "docs" / "combinations.md"

SIZES = (
    "model.config.model_type=llama", "model.config.hidden_size=64", "model.config.num_hidden_layers=4",
    "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2", "model.config.intermediate_size=256",
    "model.config.vocab_size=512", "data.max_slice=32", "batch.micro_size=4", "batch.accumulation_steps=2",
    "clip.mode=previous", "optim.lr=1e-3", "optim.warmup_steps=0", "hardware.tflops=1",
)  # fmt: skip
"""The plain run that techniques are switched on in: small, and of every part one."""

EXACT, ROUNDED, COARSE = 1e-5, 2e-3, 2e-2


@dataclass(frozen=True)
class Technique:
    """The words that switch it on, and how far losses may move by it, relatively; None where it changes which rows meet.

    What is compared with it has the words `plain` in their place. `needs_gpu` says that a CPU has no such thing.
    """

    words: tuple[str, ...]
    tolerance: float | None = EXACT
    needs_gpu: bool = False
    plain: tuple[str, ...] = ()


GPU = ("resources.gpu=1",)
UNPACKED = ("data.packing=false",)
BF16 = ("precision=mixed-bf16",)
SEVERAL = "resources.num_workers=2"

TECHNIQUES: dict[str, Technique] = {
    "precision=amp-bf16": Technique(("precision=amp-bf16",), COARSE),
    "precision=amp-fp16": Technique(("precision=amp-fp16",), COARSE, needs_gpu=True),
    "precision=mixed-bf16": Technique(("precision=mixed-bf16",), COARSE),
    "compile=true": Technique(("compile=true",), EXACT, needs_gpu=True),
    "cuda_graph=true": Technique(("cuda_graph=true",), EXACT, needs_gpu=True),
    "activation_checkpoint=full": Technique(("activation_checkpoint=full",)),
    "activation_checkpoint=sqrt": Technique(("activation_checkpoint=sqrt",)),
    "activation_checkpoint=every_n": Technique(("activation_checkpoint=every_n", "activation_checkpoint_every=2")),
    "activation_checkpoint=selective": Technique(("activation_checkpoint=selective", "activation_checkpoint_budget=64KiB")),
    "activation_checkpoint=offload": Technique(("activation_checkpoint=offload",)),
    "model.fused_qkv=true": Technique(("model.fused_qkv=true",)),
    "attention=math": Technique(("attention=math",)),
    "attention=flash": Technique(("attention=flash", *UNPACKED, *BF16), COARSE, True, (*UNPACKED, *BF16)),
    "attention=cudnn": Technique(("attention=cudnn", *UNPACKED, *BF16), COARSE, True, (*UNPACKED, *BF16)),
    "attention=varlen": Technique(("attention=varlen", *BF16), COARSE, True, BF16),
    "attention=flex": Technique(("attention=flex",), COARSE, needs_gpu=True),
    "optim.kind=adam8bit": Technique(("optim.kind=adam8bit",), ROUNDED),
    "optim.kind=paged_adam8bit": Technique(("optim.kind=paged_adam8bit",), ROUNDED, needs_gpu=True),
    "optim.in_backward=true": Technique(("optim.in_backward=true", "batch.accumulation_steps=1", "batch.micro_size=8")),
    "loss.chunk_tokens=32": Technique(("loss.chunk_tokens=32",)),
    "allocator=expandable": Technique(("allocator=expandable",), needs_gpu=True),
    "allocator=async": Technique(("allocator=async",), needs_gpu=True),
    "data.length_grouping=true": Technique(("data.length_grouping=true", *UNPACKED), None),
    "batch.dynamic=true": Technique(("batch.dynamic=true", "batch.min_micro_size=2", "batch.max_micro_size=8")),
    "engine.kind=stream": Technique(("engine.kind=stream",)),
    SEVERAL: Technique(("resources.num_workers=2", "batch.accumulation_steps=1"), needs_gpu=True),
}
"""Every technique by the key that switches it on."""


@dataclass(frozen=True)
class Pair:
    """Two techniques in one run: refused with a reason, or run on a CPU or only on a GPU."""

    first: str
    second: str
    refusal: str | None

    @property
    def needs_gpu(self) -> bool:
        """Whether no CPU can run it."""
        return TECHNIQUES[self.first].needs_gpu or TECHNIQUES[self.second].needs_gpu

    @property
    def has_several_workers(self) -> bool:
        """Whether it takes more than one process."""
        return SEVERAL in (self.first, self.second)


def words_of(*names: str, plain: str | None = None) -> list[str]:
    """Return the words of a run with these techniques, and with the plain words of another one."""
    words = [word for name in names for word in TECHNIQUES[name].words]
    needs_gpu = any(TECHNIQUES[name].needs_gpu for name in (*names, plain) if name is not None)
    words += [*(TECHNIQUES[plain].plain if plain else ()), *(GPU if needs_gpu else ())]
    if "engine.kind=stream" in names and not any(word.startswith("activation_checkpoint=") for word in words):
        words.append("activation_checkpoint=full")
    return [*SIZES, *words]


def pairs() -> Iterator[Pair]:
    """Yield every pair of techniques of different keys."""
    for first, second in combinations(TECHNIQUES, 2):
        if first.partition("=")[0] != second.partition("=")[0]:
            try:
                resolve("cpu", "lm-tiny", words_of(first, second))
            except ConfigError as error:
                yield Pair(first, second, str(error))
            else:
                yield Pair(first, second, None)


def document() -> str:
    """Return docs/combinations.md."""
    found = list(pairs())
    refused = [pair for pair in found if pair.refusal is not None]
    rows = [f"| `{pair.first}` | `{pair.second}` | {pair.refusal} |" for pair in refused]
    run = [pair for pair in found if pair.refusal is None]
    here, there = (sum(p.needs_gpu == gpu and not p.has_several_workers for p in run) for gpu in (False, True))
    return "\n".join([
        "# What goes with what",
        "",
        f"Generated by `python benchmarks/combinations.py`. Of {len(found)} pairs of techniques {len(run)} run. Each must train "
        f"as with one of the two alone: {here} are tested on a CPU (`tests/runtime/test_combinations.py`), {there} need a GPU, "
        f"where the same test runs them; the {len(run) - here - there} with several workers are not tested pair by pair. The "
        "others are refused at start:",
        "",
        "| | with | refused |",
        "| --- | --- | --- |",
        *rows,
        "",
        "What belongs to the model (attention dropout, windows) or to the machine is checked when the run starts, by name.",
        "",
    ])  # fmt: skip


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
