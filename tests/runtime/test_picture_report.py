import json
import re
from pathlib import Path

import pytest
from PIL import Image

from fluxray.data.pictures import Pictures, open_pictures
from fluxray.data.survey import Survey, survey
from fluxray.errors import DataError
from fluxray.runtime.picture_report import describe, summary, write_report
from tests.data.hostile import LIMITS, hostile, write_folder

CONFIG = LIMITS.model_copy(update={"small_buckets": "merge", "no_caption": "empty"})


@pytest.fixture
def surveyed(tmp_path: Path) -> tuple[Pictures, Survey]:
    vanish = write_folder(tmp_path / "photos")
    (tmp_path / "photos" / "notes.md").write_text("x")
    Image.new("RGB", (64, 128), "green").save(tmp_path / "photos" / "tall.png")
    pictures = open_pictures(f"folder:{tmp_path / 'photos'}", config=CONFIG)
    assert pictures.refs()
    vanish()
    return pictures, survey(pictures, CONFIG, global_batch=4)


def test_every_picture_is_used_or_quarantined_and_counted(surveyed):
    found = summary(surveyed[1])
    quarantined = {entry["key"]: reason for reason, entries in found["quarantined"].items() for entry in entries}
    assert found["pictures"] == found["used"] + len(quarantined) == len(hostile()) + 1
    assert {key.rpartition("/")[2] for key in quarantined} == {
        file.name for file in hostile() if file.fault and not file.fault.startswith("no caption")
    }
    assert sum(entry["samples"] for entry in found["buckets"]) == found["used"]
    assert found["captions"]["empty"] == 4 and found["captions"]["most_words"] == 10_000
    assert found["other_files"] == {".md": 1}
    assert found["small_buckets"] == ["80x48 with 1: merged into 48x80"]


def test_captions_are_counted_in_tokens_where_somebody_counts_them(surveyed):
    plain = summary(surveyed[1])["captions"]["over_long"]
    assert [(entry["words"], "tokens" in entry) for entry in plain] == [(10_000, False)]
    counted = summary(surveyed[1], lambda text: 2 * len(text.split()), 5)["captions"]["over_long"]
    assert counted[0] == {"key": plain[0]["key"], "words": 10_000, "tokens": 20_000, "cut_tokens": 19_995}


def test_the_lines_name_reasons_copies_buckets_and_what_is_ignored(surveyed):
    lines = describe(summary(surveyed[1], lambda text: len(text.split()), 512))
    text = "\n".join(lines)
    assert re.match(r"\d+ pictures: \d+ used, \d+ quarantined", lines[0])
    for words in ("too many pixels, such as", "copies of others", "9,488 tokens of it are cut", "merged into", "1 .md files"):
        assert words in text
    assert all("\n" not in line for line in lines)


def test_a_report_is_json_with_a_page_and_a_sheet_of_each_bucket(surveyed, tmp_path, recwarn):
    pictures, found = surveyed
    written = write_report(tmp_path / "report", found, pictures, CONFIG)
    assert json.loads((tmp_path / "report" / "pictures.json").read_text(encoding="utf-8")) == written
    sheets = {f"bucket-{entry['height']}x{entry['width']}.png" for entry in written["buckets"]}
    assert {path.name for path in (tmp_path / "report").glob("*.png")} == {"pictures.png", *sheets}
    for path in (tmp_path / "report").glob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 100
    assert not recwarn.list


def test_nothing_but_faults_is_a_report_too(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    pictures = open_pictures(f"folder:{folder}", config=LIMITS)
    found = survey(pictures, LIMITS, 4)
    written = write_report(tmp_path / "report", found, pictures, LIMITS)
    assert written["used"] == 0 and describe(written)[0] == "1 pictures: 0 used, 1 quarantined"
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match="holds no pictures"):
        survey(open_pictures(f"folder:{folder}"), LIMITS, 4)
