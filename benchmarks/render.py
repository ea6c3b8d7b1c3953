"""Write docs/benchmarks.md and docs/reliability.md, never typed by hand, from benchmarks/results/."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flow_conclusion import flow_conclusion
from scaling_conclusion import scaling_conclusion

ROOT = Path(__file__).parents[1]
RESULTS, DOCUMENTS = ROOT / "benchmarks" / "results", ROOT / "docs"

Row = dict[str, Any]

COLUMNS = {
    "model": "model",
    "note": "what",
    "num_gpus": "GPUs",
    "num_faults": "faults",
    "num_workers": "workers",
    "median_s": "seconds to the next step, median",
    "worst_s": "worst",
    "most_steps_again": "steps done again, at most",
    "num_steps": "steps",
    "seconds": "seconds",
    "undisturbed_s": "undisturbed, s",
    "step_ms": "step, ms",
    "elements": "elements",
    "bytes_per_element": "bytes an element",
    "ms": "ms",
    "copy_gb_per_s": "copy, GB/s",
    "undisturbed_step_ms": "undisturbed step, ms",
    "slowest_ms": "slowest step, ms",
    "undisturbed_slowest_ms": "slowest undisturbed step, ms",
    "precision": "precision",
    "master": "master",
    "resident_blocks": "resident blocks",
    "kept_blocks": "blocks that keep activations",
    "recomputed": "forward computed again",
    "images_per_step": "images a step",
    "tokens_per_step": "tokens a step",
    "tokens_per_s": "tokens/s",
    "step_s": "step, s",
    "planned_step_s": "planned, s",
    "images_per_s": "images or captions/s",
    "bare_images_per_s": "bare encoder",
    "first_shard_s": "until the first shard, s",
    "gigabytes": "shards, GB",
    "model_tflops": "model TFLOPS",
    "card_matrix_tflops": "card's bf16 product, TFLOPS",
    "share_of_matrix_rate": "share",
    "of_linear": "of linear",
    "exposed_share": "communication exposed",
    "held_gib": "held a GPU, GiB",
    "share_gib": "its share of 12 bytes a parameter, GiB",
    "gathered_gib": "gathered blocks, GiB",
    "kept_results_gb": "kept instead of computed again, GB",
    "device_gb": "device GB",
    "planned_device_gb": "planned",
    "host_gib": "host GiB",
    "claim": "claimed",
    "saved_gb": "GB saved",
    "reserved_over_allocated": "reserved over allocated",
    "padding_share": "padding",
    "last_loss": "last loss",
    "off_by_loss": "loss off by",
    "range_of_seeds": "range of seeds",
    "best_lr": "best learning rate",
    "lr": "learning rate",
    "micro_size": "micro-batch",
    "accumulation_steps": "accumulation",
    "num_trials": "trials",
    "num_stopped": "stopped early",
    "num_ended_before": "ended before the kill",
    "num_resumed": "gone on from a checkpoint",
    "driver_ended_s": "driver ended after, s",
    "tokens": "tokens in all",
    "equal": "equal to undisturbed",
    "first_step_s": "first step, s",
    "compile_s": "compiling in it, s",
    "ratio": "ratio",
    "git": "revision",
    "price_per_hour": "dollars an hour",
    "price_per_million": "dollars a million tokens",
    "first_blocked_s": "first save: training stood still, s",
    "blocked_s": "later ones, s",
    "durable_s": "until durable, s",
    "checkpoint_gb": "checkpoint, GB",
    "gb_per_s": "GB/s",
}
"""Keys of a row that are shown, in this order, with their headings; a column without values is left out."""


def lm_conclusion(rows: list[Row]) -> str:
    """Say what the rows of lm.json show."""
    by_note = {row["note"]: row for row in rows}

    def share(note: str) -> str:
        return f"{by_note[note]['share_of_matrix_rate']:.0%}"

    best = "compiled, dropout 0.1, one document a row"
    packed = "compiled, dropout 0.1, packed documents"
    eager = "eager, dropout 0.1, one document a row"
    full = "compiled, dropout 0.1, one document a row, full checkpointing"
    return (
        f"With the published dropout of 0.1, blocks compiled and nothing recomputed, training runs at {share(best)} of the rate "
        f"at which this card multiplies bf16 matrices ({share('compiled, dropout 0, one document a row')} without dropout). "
        f"Full checkpointing, which the published config.json asks for, costs "
        f"{1 - by_note[full]['tokens_per_s'] / by_note[best]['tokens_per_s']:.0%} of the speed and saves "
        f"{by_note[best]['device_gb'] - by_note[full]['device_gb']:.0f} GB: set `activation_checkpoint=none` "
        f"where memory allows. "
        f"Rows that hold several documents need a mask, which rules flash attention out: {share(packed)}. "
        f"Without compilation: {share(eager)}."
    )


def service_conclusion(rows: list[Row]) -> str:
    """Say what the rows of service.json show."""
    by_note = {row["note"]: row for row in rows}
    later, ratio = by_note["asynchronous save"], by_note["Trainer, Ray and MLflow, a save in the background"]["ratio"]
    return (
        f"The loop that users run, with Ray, MLflow, progress and metrics of every step, keeps {ratio:.1%} of the speed of the "
        f"engine alone. An asynchronous save stops training for {later['blocked_s']:.1f} s; the first of a run, which takes its "
        f"memory, for {later['first_blocked_s']:.1f} s. It is durable after {later['durable_s']:.0f} s, at "
        f"{later['ratio']:.0%} of the rate of the disk."
    )


def encode_conclusion(rows: list[Row]) -> str:
    """Say what the rows of encode.json show."""
    measured = [row for row in rows if "ratio" in row]
    worst = min(measured, key=lambda row: row["ratio"])
    return (
        f"`fluxray encode`, from files to shards, keeps {worst['ratio']:.0%} or more of the rate of the bare encoder on the same "
        f"card ({worst['model']}, {worst['note']}, has the least). Encoders have the published sizes and random weights."
    )


def drill_conclusion(rows: list[Row]) -> str:
    """Say what the rows of drill.json, or of the drill with more workers, show."""
    whole = next(row for row in rows if "undisturbed_s" in row)
    kinds = ", ".join(f"{row['note']}: {row['num_faults']}" for row in rows if row is not whole)
    return (
        f"One training with FSDP2 over {whole['num_workers']} workers was hit by {whole['num_faults']} SIGKILLs at seeded random "
        f"steps ({kinds}) and ended as the undisturbed one: the losses of all {whole['num_steps']} steps and all bytes of "
        "weights and optimizer states are equal, MLflow has each step once, the run never went back behind its last commit, and "
        "no process or resource claim was left. Most of the time to the next step is the start of processes and their imports."
    )


def outage_conclusion(rows: list[Row]) -> str:
    """Say what the rows of outage.json show."""
    phases = [row for row in rows if "ratio" in row]
    worst = max(phases, key=lambda row: row["ratio"])
    return (
        f"Training does not notice what MLflow does: the median step of each phase is at most {worst['ratio']:.1%} of the "
        f"undisturbed one of the same run. The server had all {rows[-1]['num_steps']:,} steps, each once, when it was back."
    )


def techniques_conclusion(rows: list[Row]) -> str:
    """Say what the rows of techniques.json show."""
    whole = next((row for row in rows if row["note"] == "all together" and "ratio" in row), None)
    measured = sorted((row for row in rows if "tokens_per_s" in row and "ratio" in row), key=lambda row: -row["ratio"])
    pays = ", ".join(f"`{row['note']}` {row['ratio']:.2f}" for row in measured if row["ratio"] >= 1.03 and row is not whole)
    costs = ", ".join(f"`{row['note']}` {row['ratio']:.2f}" for row in measured if row["ratio"] < 0.97)
    told = f"Times the speed of its baseline: {pays or 'nothing alone'} pay in speed; {costs or 'nothing'} cost some, for memory."
    if whole is not None and "saved_gb" in whole:
        told += f" What pays, all together, trains {whole['ratio']:.2f} times as fast in {whole['saved_gb']:.0f} GB less."
    return told


def stream_conclusion(rows: list[Row]) -> str:
    """Say what the rows of stream.json show."""
    by_note = {row["note"]: row for row in rows}
    whole = by_note["neox-20b, 16,384 tokens"]
    told = (
        f"All {whole['parameters'] / 1e9:.2f}B parameters are trained in {whole['device_gb']:.0f} GB of device memory and "
        f"{whole['host_gib']:.0f} GiB of host memory, at {whole['tokens_per_s']:,} tokens/s: {whole['model_tflops']:.0f} model "
        f"TFLOPS, where the card multiplies bf16 matrices at {whole['card_matrix_tflops']:.0f}. The first step is done "
        f"{whole['first_step_s']:.0f} s after the start; later it waits {1000 * whole['wait_fetch_s']:.0f} ms a step for copies."
    )
    streamed = by_note.get("8 blocks, streamed", {})
    if "ratio" in streamed:
        told += f" Streaming costs {1 - streamed['ratio']:.1%}: 8 blocks run at {streamed['ratio']:.1%} of all resident."
    peers = [row for row in rows if str(row.get("baseline")).startswith("8 blocks, streamed")]
    if peers:
        best = max(peers, key=lambda row: row["ratio"])
        told += f" On 8 blocks the fastest of the others, {best['note']}, reaches {best['ratio']:.0%} of it"
        zero = next((row for row in peers if row["note"] == "DeepSpeed ZeRO-3, all offloaded"), None)
        told += f"; it is {1 / zero['ratio']:.1f} times as fast as DeepSpeed's ZeRO-3 offload." if zero else "."
    return told


def step_kernel_conclusion(rows: list[Row]) -> str:
    """Say what the rows of step_kernel.json show."""
    shares = ", ".join(f"{row['ratio']:.0%} with {row['master']} masters" for row in rows if "ratio" in row)
    return (
        "The fused step of a block of neox-20b reads and writes each byte of its state once, at this share of the rate at which "
        f"the card copies memory: {shares}. A step of the whole model spends {44 * rows[0]['ms']:.0f} ms in it."
    )


def prediction_conclusion(rows: list[Row]) -> str:
    """Say what the rows of prediction.json show."""
    of_model = [row for row in rows if row["model"] == "neox-20b"]
    card, group = of_model[1], of_model[-1]
    cost, speed = card["price_per_million"] / group["price_per_million"], card["tokens_per_s"] / group["tokens_per_s"]
    return (
        "**A prediction of the memory plan, not a measurement**: 25 GB/s each way over the link, 80 to 120 of the card's 155 "
        f"TFLOPS. At {card['price_per_hour']:.2f} dollars an hour a million tokens of neox-20b cost "
        f"{card['price_per_million']:.2f} dollars on one card that attains 100 TFLOPS, {cost:.0%} of what they cost on the "
        f'{group["note"]}, at {speed:.1%} of its speed. (The "Flux 2" report gives 60% less cost at 55% less speed, of a model '
        "of 1.4B parameters against four V100s.) Put in your own prices: they decide."
    )


def sweep_conclusion(rows: list[Row]) -> str:
    """Say what the rows of sweep.json show."""
    by_note = {row["note"]: row for row in rows}
    grid, asha, resumed = (by_note[note] for note in ("3 x 3 x 2 grid", "the same under ASHA", "driver killed, then --resume"))
    at_lr = sorted((row["best_lr"], row["last_loss"]) for row in rows if row["note"] == "its best at one learning rate")
    inner = at_lr[0][1] > grid["last_loss"] < at_lr[-1][1]
    losses = ", ".join(f"{loss:g} at {lr:g}" for lr, loss in at_lr)
    where = "worse on both sides" if inner else "at the edge of what was searched"
    off = abs(asha["last_loss"] / grid["last_loss"] - 1)
    table = "the same table, to the bit, as" if resumed["equal"] else "another table than"
    return (
        f"At equal tokens the grid's optimum is a learning rate of {grid['best_lr']:g}, {where} (held-out loss {losses}). "
        f"ASHA stops {asha['num_stopped']} of {asha['num_trials']} trials early and spends {asha['ratio']:.0%} of the grid's "
        f"tokens; its best is {off:.1%} off the grid's. A sweep whose driver was killed with SIGKILL and resumed has {table} an "
        "undisturbed one."
    )


def sweep_faults_conclusion(rows: list[Row]) -> str:
    """Say what the rows of sweep-faults.json show."""
    waits = " and ".join(f"{row['driver_ended_s']} s" for row in rows if "driver_ended_s" in row)
    table = "the table of an undisturbed sweep, to the bit" if all(row["equal"] for row in rows) else "another table"
    return (
        "A sweep that loses a node for good goes on by itself: its trials wait for room on what is left. One that loses the head "
        f"of its cluster cannot: its driver says how to go on, ends after {waits}, and `--resume` on another "
        f"head does so. All end with {table}; no trial that had ended ran again, the others went on from their checkpoints, and "
        "MLflow has every run and every point once."
    )


def sweep_card_conclusion(rows: list[Row]) -> str:
    """Say what the rows of sweep-card.json show."""
    best, report = rows[0], next((row for row in rows if row["note"].endswith("the report's best")), None)
    told = (
        f"At equal tokens micro-batch {best['micro_size']}, learning rate {best['lr']:g} and accumulation "
        f"{best['accumulation_steps']} won, with a held-out loss of {best['last_loss']:g}"
    )
    if report is None:
        return f"{told}; the report's best (8, 5e-5, 4) was not among the trials that ended."
    return f"{told}; the report's best (8, 5e-5, 4) reaches {report['last_loss']:g}."


CONCLUSIONS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "service": ("What Ray, MLflow and saving cost: flux2-seed on one GPU", service_conclusion),
    "encode": ("Encoding ahead: pictures and captions on one GPU", encode_conclusion),
    "drill": ("Kills at random steps", drill_conclusion),
    "drill-8-workers": ("Kills at random steps, 8 workers", drill_conclusion),
    "stream": ("neox-20b (20.55B) on one GPU of at most 45 GB, sequence 2,048", stream_conclusion),
    "step_kernel": ("The optimizer step of one block, 8-bit AdamW", step_kernel_conclusion),
    "techniques": ("What each technique costs and saves: flux2-seed on one GPU", techniques_conclusion),
    "flow": ("FLUX on one GPU, streamed", flow_conclusion),
    "prediction": ("What to expect of one RTX A6000, and what it costs", prediction_conclusion),
    "sweep": ("Sweeps: lm-tiny on two cores", sweep_conclusion),
    "sweep-faults": ("A sweep whose cluster loses a node, or its head", sweep_faults_conclusion),
    "sweep-card": ("The grid of the report: flux2-seed on one GPU, trials that share it", sweep_card_conclusion),
    "scaling": ("Groups of GPUs: FSDP2 on one host", scaling_conclusion),
    "outage": ("An MLflow server that dies, hangs or is slow", outage_conclusion),
    "lm": ("flux2-seed (1.41B) on one GPU, sequence 2,048", lm_conclusion),
}


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    lines = ["| " + " | ".join(COLUMNS[key] for key in keys) + " |", "| " + " | ".join("---" for _ in keys) + " |"]
    lines += ["| " + " | ".join(_cell(key, row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def section(record: dict[str, Any]) -> str:
    """Return one result file as a section: what it is, what to conclude, the table, how to repeat it."""
    title, conclude = CONCLUSIONS[record["name"]]
    machine, versions = record["machine"], record["versions"]
    where = f"{machine['cores']} cores"
    if "card" in machine:
        where = f"{machine['num_cards']} x {machine['card']}, driver {machine['driver']}, CUDA {machine['cuda']}"
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    return "\n\n".join(
        [
            f"## {title}",
            conclude(record["rows"]),
            table(record["rows"]),
            f"{record['date']}, revision {record['git']}; {where}; {libraries}. Repeat with `{record['command']}`.",
        ]
    )


INTROS = {
    "benchmarks.md": (
        "# Benchmarks\n\nGenerated by `python benchmarks/render.py` from `benchmarks/results/`. Model FLOPs are three times the "
        "forward's matrix products and attention (causal: half of the square); recomputation does not count. The card's own "
        "rate is that of a large bf16 matrix product, measured in the same run. Device memory is what nvidia-smi shows, in "
        "10^9 bytes."
    ),
    "reliability.md": (
        "# Reliability\n\nGenerated by `python benchmarks/render.py` from `benchmarks/results/`. `make drill` repeats it on any "
        "machine with two cores."
    ),
}
"""The documents and how each begins."""

RELIABILITY = ("drill", "drill-8-workers", "outage", "sweep-faults")
"""Results that belong into reliability.md; the others are benchmarks."""


def render(document: str) -> str:
    """Return one of the documents, whole."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    wanted = [record for record in records if (record["name"] in RELIABILITY) == (document == "reliability.md")]
    return "\n\n".join([INTROS[document], *map(section, wanted)]) + "\n"


def _cell(key: str, value: object) -> str:
    if isinstance(value, float) and key in ("ratio", "recomputed", "share_of_matrix_rate", "of_linear", "exposed_share"):
        return f"{value:.1%}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    for name in INTROS:
        (DOCUMENTS / name).write_text(render(name))
        print(DOCUMENTS / name)
