"""Pictures of a sweep, drawn from its table alone.

pictures/parallel.png      each trial as a line through the values of its keys to the metric
pictures/pairs.png         the best result for each two values of each two keys
pictures/by-tokens.png     the metric against what was learned from; by-seconds.png: against time
pictures/importance.png    how much each key decides
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from fluxray.runtime.sweep_axes import Axis, axes_of
from fluxray.runtime.sweep_importance import Importance, importance
from fluxray.runtime.sweep_shown import ENDS
from fluxray.runtime.sweep_table import Point, Status, Table, Trial, finite

BEST, FAILED, FRAME = "#d1495b", "#9aa0a6", "#dddddd"
MAX_PAIRED = 8
"""Of at most so many keys each pair is drawn: 28 maps."""

MAX_NARROW = 4
"""Maps of more cells along one axis are drawn larger."""

MAX_WRITTEN = 9
"""A map of more cells along one axis has no numbers in them."""

MAX_DIGITS = 7
"""Longer results are written with an exponent."""

MAX_MARKED = 20
"""Curves of more points have no marks at them."""

STYLES: dict[Status, Any] = {"ended": "-", "stopped": "--", "running": ":", "failed": ":", "waiting": ":"}
WORDS: dict[Status, str] = {**ENDS, "running": "not over"}


class Picture(NamedTuple):
    """A picture's file below `pictures/`, and what it shows."""

    file: str
    title: str
    caption: str


class Values(NamedTuple):
    """The finite results of a sweep and how they are coloured: `worst` is the last that is not far off the others."""

    best: float
    worst: float
    clipped: bool
    decimals: int

    def write(self, value: float) -> str:
        """Return a value with the digits that tell the results apart."""
        text = f"{value:.{self.decimals}f}"
        return text if len(text) <= MAX_DIGITS else f"{value:.3g}"


def draw(table: Table, folder: Path, unit: str = "tokens", say: Callable[[str], Any] = print) -> list[Picture]:
    """Draw all pictures of a sweep that there is something to show of into `folder`; return them.

    `unit` is what the tokens of a point are. One that cannot be drawn is said, and left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Picture] = []
    for path in folder.glob("*.png"):
        path.unlink()
    values = _values(table)
    if values is None:
        return found
    axes = axes_of(table)
    drawers = (
        lambda: _draw_parallel(table, axes, values, folder),
        lambda: _draw_pairs(table, axes, values, folder),
        lambda: _draw_curves(table, values, "tokens", unit, folder),
        lambda: _draw_curves(table, values, "seconds", "seconds of training", folder),
        lambda: _draw_importance(table.head.metric, importance(table, axes), folder),
    )
    for drawer in drawers:
        try:
            picture = drawer()
        except Exception as error:  # noqa: BLE001 - the sweep has ended; how it ended must not depend on a picture
            say(f"a picture of sweep {table.head.name} could not be drawn: {type(error).__name__}: {error}")
            continue
        if picture is not None:
            found.append(picture)
    return found


def _values(table: Table) -> Values | None:
    ended = [float(trial.value or 0) for trial in table.with_status("ended") if finite(trial.value)]
    known = ended or [float(trial.value or 0) for trial in table.trials if finite(trial.value)]
    if not known:
        return None
    lower = table.head.mode == "min"
    order = sorted(known, reverse=not lower)
    middle, late = order[len(order) // 2], order[(3 * len(order)) // 4]
    limit = late + 3 * (late - order[len(order) // 4]) if len(order) > 4 else order[-1]
    worst = next((value for value in reversed(order) if (value <= limit if lower else value >= limit)), middle)
    spread = abs(worst - order[0]) or abs(worst) or 1.0
    return Values(order[0], worst, worst != order[-1], min(max(2 - math.floor(math.log10(spread)), 0), 6))


def _draw_parallel(table: Table, axes: Sequence[Axis], values: Values, folder: Path) -> Picture | None:
    if not axes:
        return None
    figure, place = _figure(max(8.0, 1.4 * (len(axes) + 2)), 5.4)
    low, high = sorted((values.best, values.worst))
    drawn = [trial for trial in table.trials if finite(trial.value) or trial.status == "failed"]
    for trial in sorted(drawn, key=lambda one: (one is table.winner, one.status == "ended")):
        places = [axis.place(trial) for axis in axes]
        if finite(trial.value):
            share = (float(trial.value or 0) - low) / (high - low) if high > low else 0.5
            places.append(min(max(share, 0.0), 1.0))
        ends = {} if finite(trial.value) else {"marker": "x", "markevery": [-1]}
        place.plot(range(len(places)), places, **_style(table, trial, values), **ends, solid_joinstyle="round", clip_on=False)
    for number, axis in enumerate(axes):
        _draw_scale(place, number, axis.ticks())
    marks = [(i / 4, values.write(low + (high - low) * i / 4)) for i in range(5)] if high > low else [(0.5, values.write(low))]
    if values.clipped:
        edge = -1 if table.head.mode == "min" else 0
        marks[edge] = (marks[edge][0], f"{marks[edge][1]} or worse")
    _draw_scale(place, len(axes), marks)
    names = [axis.key.replace(".", ".\n") for axis in axes]
    place.set_xticks(range(len(axes) + 1), [*names, table.head.metric], fontsize=9)
    place.tick_params(axis="x", length=0, pad=10)
    place.set_yticks([])
    place.set_xlim(-0.15, len(axes) + 0.5)
    place.spines[:].set_visible(False)
    _legend(figure, table, drawn, values)
    caption = f"Each trial is a line through the values of its keys to {table.head.metric} where it came to; dark is better."
    return _saved(figure, folder, Picture("parallel.png", "Parallel coordinates", caption))


def _draw_scale(place: Any, x: int, marks: Sequence[tuple[float, str]]) -> None:
    place.plot([x, x], [0, 1], color="#555555", linewidth=1, zorder=1)
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    for y, label in marks:
        place.plot([x, x + 0.02], [y, y], color="#555555", linewidth=1, zorder=1)
        place.annotate(label, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, bbox=box, zorder=5)


def _draw_pairs(table: Table, axes: Sequence[Axis], values: Values, folder: Path) -> Picture | None:
    pairs = list(combinations(axes[:MAX_PAIRED], 2))
    if not pairs:
        return None
    wide = max(axis.num_cells for axis in axes) > MAX_NARROW
    columns = min(len(pairs), 2 if wide else 3)
    rows = math.ceil(len(pairs) / columns)
    height = (4.0 if wide else 3.1) * rows + 0.7
    figure, _ = _figure(max((5.2 if wide else 3.7) * columns, 6.4), height, empty=True)
    places = figure.subplots(rows, columns, squeeze=False)
    for place in places.flat[len(pairs) :]:
        place.set_visible(False)
    for place, (across, up) in zip(places.flat, pairs, strict=False):
        image = _draw_map(place, table, values, across, up)
    extend = ("max" if table.head.mode == "min" else "min") if values.clipped else "neither"
    size = {"shrink": 0.6, "fraction": 0.18 / height, "pad": 0.1 / height, "aspect": 40}
    bar = figure.colorbar(image, ax=places, location="top", extend=extend, **size)
    bar.set_label(table.head.metric, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    left = "" if len(axes) <= MAX_PAIRED else f" Only the first {MAX_PAIRED} of {len(axes)} keys are shown."
    caption = (
        f"The best {table.head.metric} of the trials that share two values; in brackets: all of them were stopped early; x: all "
        f"failed; empty: not tried.{left}"
    )
    return _saved(figure, folder, Picture("pairs.png", "Each pair of keys", caption))


def _draw_map(place: Any, table: Table, values: Values, across: Axis, up: Axis) -> Any:
    cells: dict[tuple[int, int], list[Trial]] = {}
    for trial in table.trials:
        cells.setdefault((up.cell(trial), across.cell(trial)), []).append(trial)
    grid = [[math.nan] * across.num_cells for _ in range(up.num_cells)]
    written = max(across.num_cells, up.num_cells) <= MAX_WRITTEN
    colours, norm = _colours(table, values)
    for (row, column), trials in cells.items():
        value, label = _cell(table, values, trials)
        grid[row][column] = value
        if written and label:
            red, green, blue, _ = colours(norm(value)) if finite(value) else (1, 1, 1, 1)
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            place.text(column, row, label, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    image = place.imshow(grid, cmap=colours, norm=norm, aspect="auto", origin="lower")
    turn = max(len(line) for label in across.cell_labels for line in label.split("\n")) * across.num_cells > 48
    place.set_xticks(range(across.num_cells), across.cell_labels, fontsize=8, rotation=35 if turn else 0)
    place.set_yticks(range(up.num_cells), up.cell_labels, fontsize=8)
    place.set_xlabel(across.key, fontsize=9)
    place.set_ylabel(up.key, fontsize=9)
    place.tick_params(length=0)
    place.spines[:].set_color(FRAME)
    return image


def _cell(table: Table, values: Values, trials: Sequence[Trial]) -> tuple[float, str]:
    """Return the value of a cell and what is written in it."""
    choose = min if table.head.mode == "min" else max
    for form, statuses in (("{}", ("ended",)), ("({})", ("stopped", "running"))):
        known = [float(one.value or 0) for one in trials if one.status in statuses and finite(one.value)]
        if known:
            return choose(known), form.format(values.write(choose(known)))
    return math.nan, "x" if any(trial.status == "failed" for trial in trials) else ""


def _draw_curves(table: Table, values: Values, by: str, label: str, folder: Path) -> Picture | None:
    figure, place = _figure(10.5, 5.4)
    drawn = [trial for trial in table.trials if any(finite(point.value) for point in trial.history)]
    for trial in sorted(drawn, key=lambda one: one is table.winner):
        history = [point for point in trial.history if finite(point.value)]
        style = _style(table, trial, values)
        marks = {"marker": "o", "markersize": 3} if len(history) <= MAX_MARKED else {}
        place.plot([getattr(point, by) for point in history], [point.value for point in history], **style, **marks)
    low, high = _window([point for trial in table.trials for point in trial.history if finite(point.value)])
    place.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    place.set_xlim(left=0)
    place.set_xlabel(label)
    place.xaxis.set_major_formatter(_thousands)
    place.set_ylabel(table.head.metric)
    place.grid(color=FRAME, linewidth=0.6)
    place.spines[["top", "right"]].set_visible(False)
    _legend(figure, table, drawn, values)
    what = "what each trial had learned from" if by == "tokens" else "the time that its workers had trained"
    caption = f"{table.head.metric} against {what}; dark is better."
    title = f"Against {label.split(maxsplit=1)[0]}"
    return _saved(figure, folder, Picture(f"by-{by}.png", title, caption))


def _window(points: Sequence[Point]) -> tuple[float, float]:
    """Return the range of values to show: without those far off all others."""
    order = sorted(point.value for point in points)
    first, middle, last = (order[(len(order) - 1) * part // 4] for part in (1, 2, 3))
    reach = 3 * (last - first) or abs(middle) or 1.0
    kept = [value for value in order if middle - reach <= value <= middle + reach]
    return (kept[0], kept[-1]) if kept[0] < kept[-1] else (kept[0] - 0.5, kept[0] + 0.5)


def _thousands(value: float, _: int) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _draw_importance(metric: str, found: Importance | None, folder: Path) -> Picture | None:
    if found is None:
        return None
    figure, place = _figure(9.0, 1.2 + 0.45 * len(found.shares))
    keys = list(found.shares)[::-1]
    bars = place.barh(keys, [100 * found.shares[key] for key in keys], color="#3f7cb5", height=0.65)
    place.bar_label(bars, labels=[f"{found.shares[key]:.0%}" for key in keys], padding=4, fontsize=9)
    place.set_xlim(0, 108)
    place.set_xticks([])
    place.tick_params(axis="y", length=0)
    place.spines[["top", "right", "bottom"]].set_visible(False)
    where = "" if found.progress >= 1 else f", compared after {found.progress:.0%} of the budget, to which all of them came"
    caption = (
        f"The share of each key in what decides about {metric}: how much worse a forest of trees predicts the order of the "
        f"results when that key's values are shuffled. From {found.num_trials} trials{where}; a key can matter by its effect on "
        "others."
    )
    return _saved(figure, folder, Picture("importance.png", "Importance of the keys", caption))


def _style(table: Table, trial: Trial, values: Values) -> dict[str, Any]:
    if trial is table.winner:
        return {"color": BEST, "linewidth": 2.6, "zorder": 4}
    known = finite(trial.value) and trial.status != "failed"
    colours, norm = _colours(table, values)
    colour = colours(norm(trial.value)) if known else FAILED
    return {"color": colour, "linewidth": 1.3, "alpha": 0.8, "linestyle": STYLES[trial.status], "zorder": 3 if known else 2}


def _colours(table: Table, values: Values) -> tuple[Any, Any]:
    return _scale(values.best, values.worst, table.head.mode == "min")


@cache
def _scale(best: float, worst: float, lower: bool) -> tuple[Any, Any]:
    """Return a map of colours whose dark end is the best, without the light end that a white page swallows, and its scale."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    shades = [colormaps["viridis"](0.92 * i / 63) for i in range(64)]
    low, high = sorted((best, worst))
    norm = Normalize(low, high) if high > low else Normalize(low - 0.5, low + 0.5)
    return LinearSegmentedColormap.from_list("results", shades if lower else shades[::-1]), norm


def _legend(figure: Any, table: Table, drawn: Sequence[Trial], values: Values) -> None:
    from matplotlib.lines import Line2D

    winner = table.winner
    handles = [] if winner is None else [Line2D([], [], color=BEST, linewidth=2.6, label=f"best: trial {winner.trial}")]
    for status, label in WORDS.items():
        others = [trial for trial in drawn if trial.status == status and trial is not winner]
        if others:
            colour = FAILED if status == "failed" else _colours(table, values)[0](0.4)
            handles.append(Line2D([], [], color=colour, linestyle=STYLES[status], label=f"{label} ({len(others)})"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, fontsize=9, frameon=False)


def _figure(width: float, height: float, empty: bool = False) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, None if empty else figure.add_subplot()


def _saved(figure: Any, folder: Path, picture: Picture) -> Picture:
    figure.savefig(folder / picture.file)
    return picture
