"""What a survey of pictures found: `pictures.json`, a page of histograms, and a contact sheet of each bucket.

REPORT/pictures.json              counts, each quarantined picture with its reason, duplicates, buckets
REPORT/pictures.png               pictures by bucket and by reason, words of captions, enlargements
REPORT/bucket-1024x1024.png       some pictures of a bucket as they are cropped, with their captions
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fluxray.config.encode import EncodeConfig
from fluxray.data.crops import Bucket, fit
from fluxray.data.decode import Quarantined
from fluxray.data.pictures import PictureRef, Pictures
from fluxray.data.prepared import Prepared, prepare_picture
from fluxray.data.survey import Survey, Surveyed
from fluxray.runtime.paths import write_text

REPORT_FILE = "pictures.json"
SHEET_PICTURES = 24
"""At most so many are on a contact sheet."""

LONG_WORDS = 380
"""Longer captions probably have more than 512 tokens; told where nobody counts tokens."""

MOST_WORDS = 500
"""Where the histogram of captions ends."""

Tokens = Callable[[str], int]


def summary(survey: Survey, count_tokens: Tokens | None = None, max_tokens: int | None = None) -> dict[str, Any]:
    """Return what `pictures.json` holds; with `count_tokens` also which captions have more than `max_tokens`, and what is cut."""
    used, plan = survey.used, survey.plan
    pictures = Counter(plan.bucket_of[one.key] for one in used)
    return {
        "pictures": len(survey.pictures),
        "used": len(used),
        "quarantined": {
            reason: [{"key": one.key, "detail": one.fault.detail} for one in found if one.fault]
            for reason, found in survey.quarantined.items()
        },
        "notes": survey.notes,
        "captions": _captions(used, count_tokens, max_tokens),
        "duplicates": survey.duplicates,
        "global_batch": plan.global_batch,
        "buckets": [
            {
                "height": bucket.height,
                "width": bucket.width,
                "samples": count,
                "pictures": pictures[bucket],
                "global_batches": round(count / plan.global_batch, 3),
            }
            for bucket, count in plan.counts.items()
        ],
        "small_buckets": [str(small) for small in plan.small],
        "other_files": dict(survey.ignored),
    }


def describe(found: dict[str, Any]) -> list[str]:
    """Return the summary in lines for people; what is fine takes no line."""
    quarantined = {reason: len(entries) for reason, entries in found["quarantined"].items()}
    captions, batch = found["captions"], found["global_batch"]
    lines = [f"{found['pictures']:,} pictures: {found['used']:,} used, {sum(quarantined.values()):,} quarantined"]
    lines += [f"  {count:,} {reason}, such as {_example(found, reason)}" for reason, count in quarantined.items()]
    lines += [f"  {count:,} {note}" for note, count in found["notes"].items()]
    if captions["empty"]:
        lines.append(f"{captions['empty']:,} have the empty caption")
    if captions["over_long"]:
        longest = captions["over_long"][0]
        cut = f"{longest['cut_tokens']:,} tokens of it are cut" if "cut_tokens" in longest else "probably cut"
        lines.append(f"{len(captions['over_long']):,} captions are too long; longest {longest['key']}: {cut}")
    if found["duplicates"]:
        copies = sum(len(keys) - 1 for keys in found["duplicates"])
        lines.append(f"{copies:,} are copies of others, all used, such as {' = '.join(found['duplicates'][0][:3])}")
    lines += [f"{count:,} {kind} files are no pictures" for kind, count in found["other_files"].items()]
    names = ", ".join(f"{entry['height']}x{entry['width']}: {entry['samples']:,}" for entry in found["buckets"])
    lines.append(f"buckets (height x width) of {names or 'none'}; a global batch has {batch:,}")
    lines += [f"  small bucket {words}" for words in found["small_buckets"]]
    return lines


def write_report(
    folder: Path,
    survey: Survey,
    pictures: Pictures,
    config: EncodeConfig,
    count_tokens: Tokens | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Write the report into `folder` and return its summary. Pictures of the contact sheets are read once more."""
    folder.mkdir(parents=True, exist_ok=True)
    found = summary(survey, count_tokens, max_tokens)
    write_text(folder / REPORT_FILE, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    _draw_histograms(survey, found, folder / "pictures.png")
    used = {one.key for one in survey.used}
    members: dict[Bucket, list[PictureRef]] = {}
    for ref in pictures.refs():
        if ref.key in used:
            bucket = survey.plan.bucket_of[ref.key]
            members.setdefault(bucket, []).append(replace(ref, bucket=bucket))
    for old in folder.glob("bucket-*.png"):
        old.unlink()
    for bucket, refs in sorted(members.items()):
        shown = [_again(pictures, ref, config) for ref in refs[:: math.ceil(len(refs) / SHEET_PICTURES)]]
        _draw_sheet(bucket, [one for one in shown if one], len(refs), folder / f"bucket-{bucket}.png")
    return found


def _captions(used: Sequence[Surveyed], count_tokens: Tokens | None, max_tokens: int | None) -> dict[str, Any]:
    words = [len(one.caption.split()) for one in used]
    long: list[dict[str, Any]] = []
    for one, num_words in zip(used, words, strict=True):
        if count_tokens is not None and max_tokens is not None:
            num_tokens = count_tokens(one.caption)
            if num_tokens > max_tokens:
                long.append({"key": one.key, "words": num_words, "tokens": num_tokens, "cut_tokens": num_tokens - max_tokens})
        elif num_words > LONG_WORDS:
            long.append({"key": one.key, "words": num_words})
    return {
        "empty": sum(not one.caption for one in used),
        "median_words": float(np.median(words)) if words else 0.0,
        "most_words": max(words, default=0),
        "over_long": sorted(long, key=lambda entry: (-entry["words"], entry["key"])),
    }


def _example(found: dict[str, Any], reason: str) -> str:
    entry = found["quarantined"][reason][0]
    return f"{entry['key']} ({entry['detail']})" if entry["detail"] else entry["key"]


def _again(pictures: Pictures, ref: PictureRef, config: EncodeConfig) -> Prepared | None:
    """Return a picture that was surveyed; None if it has vanished or changed since."""
    try:
        return prepare_picture(pictures, ref, config)
    except Quarantined:
        return None


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_histograms(survey: Survey, found: dict[str, Any], path: Path) -> None:
    figure = _figure(13, 8)
    (buckets, reasons), (words, scales) = figure.subplots(2, 2)
    names = [f"{entry['height']}x{entry['width']}" for entry in found["buckets"]]
    _bars(
        buckets,
        names,
        [entry["samples"] for entry in found["buckets"]],
        "samples by bucket (height x width); dashed: a global batch",
        ["#3f7cb5"] * len(names),
    )
    if names:
        buckets.axvline(found["global_batch"], color="black", linestyle="--", linewidth=1)
    counts = {"used": found["used"], **{reason: len(entries) for reason, entries in found["quarantined"].items()}}
    _bars(reasons, list(counts), list(counts.values()), "pictures, used and quarantined", ["#5b9a5b"] + ["#d1495b"] * len(counts))
    words.hist([min(len(one.caption.split()), MOST_WORDS) for one in survey.used], bins=30, color="#7a4f9c")
    words.set(title=f"words of captions; {MOST_WORDS} stands for all that have more", ylabel="pictures")
    scales.hist([fit(one.size, survey.plan.bucket_of[one.key]).scale for one in survey.used], bins=30, color="#e0a030")
    scales.axvline(1, color="black", linestyle="--", linewidth=1)
    scales.set(title="scale of pictures; above 1 they are enlarged", ylabel="pictures")
    for axes in (buckets, reasons, words, scales):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _bars(axes: Any, names: Sequence[str], counts: Sequence[int], title: str, colours: Sequence[str]) -> None:
    axes.barh(range(len(names)), counts, color=colours[: len(counts)])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title)
    for place, count in enumerate(counts):
        axes.text(count, place, f" {count:,}", va="center", fontsize=8)


def _draw_sheet(bucket: Bucket, shown: Sequence[Prepared], num_pictures: int, path: Path) -> None:
    columns = 6
    rows = max(math.ceil(len(shown) / columns), 1)
    side = 2.2
    figure = _figure(columns * side, rows * (side * min(bucket.height / bucket.width, 2.0) + 0.45) + 0.5)
    figure.suptitle(f"{bucket} (height x width): {len(shown)} of {num_pictures:,} pictures, as they are cropped", fontsize=11)
    for place, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if place < len(shown):
            axes.imshow(shown[place].pixels)
            axes.set_title(_plain(shown[place].caption, 34), fontsize=7, parse_math=False)
    figure.savefig(path)


def _plain(text: str, limit: int) -> str:
    """Return a caption on one line that matplotlib draws as it is; characters that its font lacks become a sign."""
    line = " ".join(text.split()) or "(empty)"
    line = "".join(character if character.isprintable() and character < "\u0530" else "\N{WHITE SQUARE}" for character in line)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
