"""What a reader should conclude from scaling.json."""

from typing import Any

Row = dict[str, Any]


def scaling_conclusion(rows: list[Row]) -> str:
    """Say what the rows show."""
    speeds = [row for row in rows if "of_linear" in row]
    words = [_linear(speeds)]
    over = [f"{row['ratio']:.2f} times on {row['num_gpus']} ({row['note']})" for row in speeds if "ratio" in row]
    if over:
        words.append(f"Images a second over those of plain FSDP2, eager, in the same command: {', '.join(over)}.")
    compared = [row for row in rows if "off_by_loss" in row]
    if compared:
        worst = max(compared, key=lambda row: row["off_by_loss"])
        words.append(
            "Losses on other numbers of GPUs, and behind a checkpoint that another number resumes, differ by "
            f"{worst['off_by_loss']:.1e} at most (`{worst['note']}`)."
        )
    words += _offloaded(speeds)
    killed = [f"{row['median_s']:.0f} s on {row['num_gpus']}" for row in rows if "median_s" in row]
    if killed:
        words.append(f"From SIGKILL of a worker to the next step: {', '.join(killed)}.")
    return " ".join(words)


def _linear(speeds: list[Row]) -> str:
    """Say how the rates grow with the number of GPUs, from the fewest to the most that a row was measured on."""
    told: list[str] = []
    for row in speeds:
        most = max(one["num_gpus"] for one in speeds if one["note"] == row["note"])
        if row["num_gpus"] == most > row["linear_from"]:
            told.append(f"`{row['note']}` {row['of_linear']:.0%} from {row['linear_from']} to {most}")
    return f"Of linear scaling are kept: {', '.join(told)}." if told else "Each was measured on one number of GPUs."


def _offloaded(speeds: list[Row]) -> list[str]:
    """Say what masters on the host cost in speed, and what a larger batch gives of it back."""
    told: list[str] = []
    for row in speeds:
        name, found, more = row["note"].partition(", cpu_offload")
        beside = [one for one in speeds if one["note"] == name and one["num_gpus"] == row["num_gpus"]]
        if found and beside:
            slower = 1 - row["images_per_s"] / beside[0]["images_per_s"]
            told.append(f"Masters on the host{more} cost {slower:.0%} of the speed on {row['num_gpus']}.")
    return told
