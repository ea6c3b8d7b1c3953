"""What the rows of benchmarks/flow.py show, in words."""

from typing import Any

Row = dict[str, Any]


def flow_conclusion(rows: list[Row]) -> str:
    """Say what the rows of flow.json show."""
    by_note = {row["note"]: row for row in rows}
    first, second = by_note["FLUX.1-dev, 512 px"], by_note["FLUX.2-dev, 512 px, stochastic"]
    small = by_note["FLUX.1-dev, 512 px, 24 GB, host of 64 GiB"]
    off = max(abs(row["planned_device_gb"] / row["device_gb"] - 1) for row in (first, small))
    return (
        f"Every parameter is trained with 8-bit Adam. FLUX.1-dev ({first['parameters'] / 1e9:.1f}B) at 512 px learns "
        f"{first['images_per_s']:.1f} images/s in {first['device_gb']:.0f} GB of device memory: "
        f"{first['share_of_matrix_rate']:.0%} of the card's matrix rate, not counting what is computed again. With "
        "`activation_checkpoint: selective` results of matrix products fill the memory that is left, and backward computes "
        f"{first['recomputed']:.0%} of the forward again. It also trains in {small['device_gb']:.1f} GB beside "
        f"{small['host_gib']:.0f} GiB of the host, at {small['share_of_matrix_rate']:.0%}; in these two, planned memory and "
        f"measured differ by {off:.1%} at most. FLUX.2-dev ({second['parameters'] / 1e9:.1f}B) takes "
        f"{second['device_gb']:.0f} GB and {second['host_gib']:.0f} GiB, three blocks without a copy on the host, at "
        f"{second['share_of_matrix_rate']:.0%}. "
        f"Compiling from nothing takes {first['compile_s']:.0f} s of FLUX.1-dev's first step, once for each size of images."
    )
