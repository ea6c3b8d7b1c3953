"""What the memory plan predicts for an RTX A6000, and what a million tokens cost there and on a group: nothing here is measured.

    python benchmarks/predict.py [--card-price 0.80] [--group-price 14.40] [--out DIR]

Prices are dollars an hour of one card and of the whole group, to be replaced by your own. The group's rate is its cards' bf16
peak times a utilisation that well-tuned FSDP reaches; its floating-point operations are counted as the plan counts the card's.
"""

import argparse
from pathlib import Path
from typing import Any

CARD = ("hardware.link=25GB/s", "hardware.memory_bandwidth=768GB/s", "hardware.device_memory=45GB", "hardware.host_memory=128GiB")
TFLOPS = (80, 100, 120)
MODELS = {
    "neox-20b": ("batch.micro_size=4", "batch.accumulation_steps=4"),
    "flux1-dev": ("batch.micro_size=2", "batch.accumulation_steps=2"),
    "flux2-dev": ("optim.master=stochastic", "batch.micro_size=1", "batch.accumulation_steps=2"),
}
GROUP = {"num_gpus": 8, "peak_tflops": 312, "utilisation": 0.4, "note": "group of 8 A100"}


def dollars_per_million(price: float, tokens_per_s: float) -> float:
    """Return the cost of a million tokens at `price` dollars an hour."""
    return price / 3600 / tokens_per_s * 1e6


def rows_of(model: str, words: tuple[str, ...], card_price: float, group_price: float) -> list[dict[str, Any]]:
    """Return the card's rows and the group's for one model."""
    from fluxray.config.load import resolve
    from fluxray.runtime.planning import model_spec, plan_run

    rows: list[dict[str, Any]] = []
    spec = model_spec(resolve("a6000", model, list(words)))
    for tflops in TFLOPS:
        plan = plan_run(resolve("a6000", model, [*CARD, *words, f"hardware.tflops={tflops}"]), spec)
        rate = plan.demand.tokens / plan.speed.seconds
        rows.append({
            "note": f"one RTX A6000 at {tflops} TFLOPS, streamed", "model": model, "tokens_per_step": plan.demand.tokens,
            "tokens_per_s": round(rate), "step_s": round(plan.speed.seconds, 1),
            "device_gb": round(plan.device_bytes / 1e9, 1), "host_gib": round(plan.host_bytes / 2**30, 1),
            "price_per_hour": card_price, "price_per_million": round(dollars_per_million(card_price, rate), 2),
        })  # fmt: skip
    flops = 3 * spec.forward_flops / spec.row_tokens
    rate = GROUP["num_gpus"] * GROUP["peak_tflops"] * 1e12 * GROUP["utilisation"] / flops
    rows.append({
        "note": f"{GROUP['note']}, FSDP at {GROUP['utilisation']:.0%} of {GROUP['peak_tflops']} TFLOPS each", "model": model,
        "tokens_per_s": round(rate), "price_per_hour": group_price,
        "price_per_million": round(dollars_per_million(group_price, rate), 2),
    })  # fmt: skip
    return rows


def main() -> None:
    """Write benchmarks/results/prediction.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card-price", type=float, default=0.80)
    parser.add_argument("--group-price", type=float, default=14.40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import common

    rows = [row for model, words in MODELS.items() for row in rows_of(model, words, given.card_price, given.group_price)]
    common.write("prediction", rows, given.out or common.RESULTS)


if __name__ == "__main__":
    main()
