"""Folders of short runs of tiny models of every family."""

from pathlib import Path

from fluxray.config.load import resolve
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.worker import run_worker

SIZES = (
    "model.config.hidden_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=128",
    "model.config.vocab_size=512",
    "data.max_slice=32",
    "batch.micro_size=2",
    "optim.warmup_steps=1",
    "train.num_steps=3",
    "evaluation.max_rows=2",
    "checkpoint.every_steps=2",
    "hardware.tflops=1",
)
FAMILIES = {
    "gpt_neox": (),
    "llama": ("model.config.model_type=llama", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2"),
    "qwen3": (
        "model.config.model_type=qwen3",
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2",
        "model.config.head_dim=16",
        "model.config.tie_word_embeddings=true",
    ),
    "gemma3": (
        "model.config.model_type=gemma3_text",
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2",
        "model.config.head_dim=16",
        "model.config.query_pre_attn_scalar=24",
        "model.config.sliding_window=8",
        "model.config.layer_types=[sliding_attention, full_attention]",
    ),
}


def write_text(folder: Path) -> None:
    """Write the text that the models are trained on."""
    sentences = [
        f"The {thing} of number {i} stands by the {thing}.\n\n" for i in range(60) for thing in ("house", "river", "tree")
    ]
    (folder / "text.txt").write_text("".join(sentences))


def trained(family: str, shared: Path, *overrides: str) -> Path:
    """Return the folder, under `shared`, of a run of three steps on its text; it is made once."""
    folder = shared / "-".join([family, *overrides])
    if not folder.exists():
        source = f"data.source=path:{shared / 'text.txt'}"
        config = resolve("cpu", "lm-tiny", [source, *SIZES, *FAMILIES[family], *overrides])
        context = WorkerContext(0, 1, 0, folder, shared / "cache", lambda _: None, lambda _: False, [], lambda _: None)
        run_worker(config, context)
    return folder
