"""The device's memory during one step of the stream engine, drawn as stacked areas."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fluxray.engine.stream_timeline import Point, StreamBytes

GIB, MIB = 2**30, 2**20

COLOURS = {
    "CUDA context": "#9aa0a6",
    "outside the blocks: weights": "#1f4e79",
    "outside the blocks: optimizer": "#3f7cb5",
    "resident blocks": "#7fb0dd",
    "sums of gradients": "#7a4f9c",
    "slots of passing blocks": "#b79bd1",
    "kept from forward to backward": "#e0a030",
    "at work: activations, logits, temporaries": "#d1495b",
}


def draw(points: Sequence[Point], allocated: StreamBytes, context: int, limit: int | None, path: Path, title: str) -> None:
    """Write the picture (PNG) of a watched step to `path`.

    `context` bytes are the CUDA context's, `limit` what the run may take of the device, None if nothing limits it. Of every point
    the highest bytes since the point before are shown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = _layers(points, allocated, context)
    totals = [sum(values) for values in zip(*layers.values(), strict=True)]
    unit, name = (GIB, "GiB") if max(totals) >= GIB / 10 else (MIB, "MiB")
    figure = Figure(figsize=(12, 6.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    edges = [*range(len(points)), len(points)]
    stacked = [[value / unit for value in (*values, values[-1])] for values in layers.values()]
    axes.stackplot(edges, stacked, step="post", labels=list(layers), colors=[COLOURS[name] for name in layers], linewidth=0)
    _show_limit(axes, limit, max(totals), unit, name)
    _show_sections(axes, points)
    top = totals.index(max(totals))
    axes.annotate(
        f"peak {totals[top] / unit:.2f} {name}: {_words(points[top])}",
        xy=(top + 0.5, totals[top] / unit), xytext=(0, 14), textcoords="offset points", ha="center" if _central(top, points) else
        ("left" if top < len(points) / 2 else "right"), fontsize=9, arrowprops={"arrowstyle": "-", "lw": 0.8},
    )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=11, pad=26)
    axes.set_ylabel(f"memory of the device [{name}]")
    axes.set_xlabel("position in the step: number of the block")
    axes.set_xlim(0, len(points))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path)


def _layers(points: Sequence[Point], allocated: StreamBytes, context: int) -> dict[str, list[int]]:
    """Return the bytes of each layer by point, the lowest layer first; without those that are nothing."""
    constant = {
        "CUDA context": context,
        "outside the blocks: weights": allocated.outside_weights,
        "outside the blocks: optimizer": allocated.outside_states,
        "resident blocks": allocated.resident_weights + allocated.resident_states,
        "sums of gradients": allocated.gradients,
        "slots of passing blocks": allocated.slots,
    }
    layers = {name: [count] * len(points) for name, count in constant.items() if count}
    held = [max(point.held, 0) for point in points]
    layers["kept from forward to backward"] = held
    layers["at work: activations, logits, temporaries"] = [max(p.peak - h, 0) for p, h in zip(points, held, strict=True)]
    return layers


def _show_limit(axes: Any, limit: int | None, highest: int, unit: int, name: str) -> None:
    """Draw the limit, or where it lies far above everything say it."""
    ceiling = 1.18 * highest
    if limit is not None and limit < 1.8 * highest:
        axes.axhline(limit / unit, color="black", linestyle="--", linewidth=1.2, label=f"limit {limit / unit:.1f} {name}")
        ceiling = max(ceiling, 1.06 * limit)
    elif limit is not None:
        axes.plot([], [], color="black", linestyle="--", label=f"limit {limit / unit:,.0f} {name}, far above")
    axes.set_ylim(0, ceiling / unit)


def _show_sections(axes: Any, points: Sequence[Point]) -> None:
    """Mark where the forward, the turn and the backward begin, and number blocks along the axis."""
    sections = [_section(point, points) for point in points]
    starts = [i for i, section in enumerate(sections) if i == 0 or section != sections[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(points)], strict=True):
        if start:
            axes.axvline(start, color="#555555", linewidth=0.8, linestyle=":")
        if end - start > len(points) / 30 or sections[start] == "turn":
            axes.text((start + end) / 2, 1.01, sections[start], transform=axes.get_xaxis_transform(), ha="center", fontsize=9)
    first = [i for i, p in enumerate(points) if p.block >= 0 and (i == 0 or points[i - 1].block != p.block)]
    every = max(1, len(first) // 24)
    axes.set_xticks([i + 0.5 for i in first[::every]], [str(points[i].block) for i in first[::every]], fontsize=8)


def _section(point: Point, points: Sequence[Point]) -> str:
    last = max(p.block for p in points)
    if point.block == last:
        return "turn"
    if point.block >= 0:
        return "forward" if point.phase == "forward" else "backward"
    return "prologue" if point.phase in {"begin", "prologue"} else "prologue again, step"


def _words(point: Point) -> str:
    where = "outside the blocks" if point.block < 0 else f"block {point.block}"
    return f"{point.phase} of {where}" if point.block >= 0 or point.phase == "step" else point.phase


def _central(index: int, points: Sequence[Point]) -> bool:
    return 0.2 < index / len(points) < 0.8
