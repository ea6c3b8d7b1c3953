"""The page that reports a sweep: one HTML file that needs nothing else, with its pictures in it.

It is made from the sweep's folder alone, and written into it, so it can be made again at any time.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fluxray.runtime.identity import masked
from fluxray.runtime.paths import write_text
from fluxray.runtime.progress import clock
from fluxray.runtime.sweep_pictures import Picture, draw
from fluxray.runtime.sweep_shown import ENDS, counts_words, keys_words, ranked, word
from fluxray.runtime.sweep_table import Table, Trial, read_table
from fluxray.runtime.sweeps import ENVIRONMENT_FILE, PICTURES, REPORT_FILE, SPACE_FILE, Sweep, common_config

STYLE = """
:root { color-scheme: light; --line: #dddddd; --soft: #666666; --best: #d1495b; }
body {
  font: 15px/1.5 system-ui, sans-serif; color: #202124; background: white;
  max-width: 1180px; margin: 2rem auto; padding: 0 1.5rem;
}
h1 { font-size: 1.6rem; margin: 0 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .4rem 0; }
.soft, figcaption { color: var(--soft); }
figure { margin: 0 0 1.6rem; }
figcaption { font-size: .9rem; }
img { max-width: 100%; height: auto; display: block; }
.best { border-left: 4px solid var(--best); padding: .3rem 0 .3rem 1rem; margin: 1.2rem 0; }
.best b { font-size: 1.1rem; }
pre, code { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #f5f6f7; padding: .7rem .9rem; overflow-x: auto; margin: .6rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
.winner td { font-weight: 600; background: #fdf0f2; }
.failed td { color: var(--soft); }
.failed .reason { color: #a02030; min-width: 22rem; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
@media print { body { margin: 0; max-width: none; } figure { break-inside: avoid; } }
"""


def write_report(sweep: Sweep) -> Path | None:
    """Write `report.html` and `pictures/` into the sweep's folder; return the page. Never raises: what went wrong is said."""
    try:
        table = read_table(sweep.folder)
        unit = "images" if common_config(sweep).task.kind == "flow" else "tokens"
        pictures = draw(table, sweep.folder / PICTURES, unit)
        path = sweep.folder / REPORT_FILE
        write_text(path, page(sweep, table, pictures, unit))
    except Exception as error:  # noqa: BLE001 - the sweep has ended; how it ended must not depend on its report
        print(f"sweep {sweep.name} has no report: {type(error).__name__}: {masked(str(error))}", flush=True)
        return None
    return path


def page(sweep: Sweep, table: Table, pictures: Sequence[Picture], unit: str) -> str:
    """Return the page on a sweep whose pictures lie in its folder; `unit` is what the tokens of a point are."""
    name, folder = escape(sweep.name), sweep.folder
    parts = [
        f"<h1>Sweep {name}</h1>",
        f'<p class="soft">{len(table.trials)} trials: {escape(counts_words(table))}. {escape(_budget(table))}</p>',
        _best(sweep, table),
        *(_figure(picture, folder) for picture in pictures),
        "<h2>Trials</h2>",
        _trials(table, unit),
        "<h2>Environment</h2>",
        _environment(folder),
        _file("Space", folder / SPACE_FILE),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Sweep {name}</title>'
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'


def _budget(table: Table) -> str:
    best = "lowest" if table.head.mode == "min" else "highest"
    return f"Each may spend {table.head.budget.removesuffix(' a trial')}; the {best} {table.head.metric} at the end wins."


def _best(sweep: Sweep, table: Table) -> str:
    winner = table.winner
    if winner is None:
        return '<div class="best"><b>No trial has a result.</b></div>'
    commands = f"{sweep.best_command} --out best.yaml\nfluxray train --profile best.yaml"
    return (
        f'<div class="best"><b>Trial {winner.trial}: {escape(table.head.metric)} {winner.value:.6g}</b>'
        f"<p><code>{_shown(keys_words(winner.keys))}</code></p>"
        f'<p class="soft">Its run, {escape(winner.run)}, keeps its last checkpoint. Train with its values:</p>'
        f"<pre>{escape(commands)}</pre></div>"
    )


def _figure(picture: Picture, folder: Path) -> str:
    data = base64.b64encode((folder / PICTURES / picture.file).read_bytes()).decode()
    title, caption = escape(picture.title), escape(picture.caption)
    image = f'<img alt="{title}" src="data:image/png;base64,{data}">'
    return f"<figure><h3>{title}</h3>{image}<figcaption>{caption}</figcaption></figure>"


def _trials(table: Table, unit: str) -> str:
    keys, metric = table.head.keys, table.head.metric
    reasons = any(trial.reason for trial in table.trials)
    head = "".join(f"<th>{escape(one)}</th>" for one in ("trial", *keys, "status"))
    head += "".join(f'<th class="number">{escape(one)}</th>' for one in ("step", unit, "time", metric))
    rows = "\n".join(_row(table, trial, reasons) for trial in ranked(table))
    last = "<th>reason</th>" if reasons else ""
    return f'<div class="scroll"><table><thead><tr>{head}{last}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _row(table: Table, trial: Trial, reasons: bool) -> str:
    wins = trial is table.winner
    last = trial.history[-1] if trial.history else None
    status = "best" if wins else ENDS.get(trial.status, trial.status)
    keys = [_shown(word(trial.keys[key])) if key in trial.keys else "" for key in table.head.keys]
    cells = "".join(f"<td>{cell}</td>" for cell in [str(trial.trial), *keys, status])
    numbers = [f"{last.step if last else 0:,} / {trial.num_steps:,}"]
    numbers += [f"{last.tokens:,}", clock(last.seconds), f"{last.value:.6g}"] if last else ["", "", ""]
    cells += "".join(f'<td class="number">{cell}</td>' for cell in numbers)
    if reasons:
        cells += f'<td class="reason">{_shown(trial.reason or "")}</td>'
    kind = "winner" if wins else trial.status
    return f'<tr class="{kind}">{cells}</tr>'


def _environment(folder: Path) -> str:
    try:
        found: Mapping[str, Any] = json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "<p>Not recorded.</p>"
    rows = [(key.removeprefix("version."), value) for key, value in found.items() if key != "nodes"]
    nodes = found.get("nodes", [])
    rows += [(f"node {number}", _node(node)) for number, node in enumerate(nodes)]
    cells = "\n".join(f"<tr><th>{escape(key)}</th><td>{_shown(str(value))}</td></tr>" for key, value in rows)
    return f"<table>{cells}</table>"


def _node(resources: Mapping[str, float]) -> str:
    """Return what a node has; Ray's names for its amounts of memory are bytes."""
    shown = {key: f"{value / 2**30:.1f} GiB" if "memory" in key else f"{value:g}" for key, value in resources.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items() if not key.startswith("node:"))


def _file(title: str, path: Path) -> str:
    if not path.exists():
        return ""
    return f"<details><summary>{title}</summary><pre>{_shown(path.read_text(encoding='utf-8'))}</pre></details>"


def _shown(text: str) -> str:
    return escape(masked(text))
