"""Each of forty hostile files is used rightly, or quarantined with its reason; none costs more than itself."""

import contextlib
import io
import json
import resource
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fluxray.data.crops import choose_crop, cut
from fluxray.data.decode import Quarantined, decode, decode_mask
from fluxray.data.pictures import open_pictures
from fluxray.data.prepared import prepare_picture
from fluxray.data.survey import survey
from tests.data.hostile import HEIGHT, LIMITS, WIDTH, Hostile, alpha, bomb, hostile, rgb, saved, scene, srgb, write_folder

each_file = pytest.mark.parametrize("file", hostile(), ids=lambda file: file.name)


def test_there_are_at_least_forty():
    names = [file.name for file in hostile()]
    assert len(set(names)) == len(names) >= 40


@each_file
def test_it_is_used_rightly_or_quarantined_with_the_reason(file: Hostile, tmp_path: Path, recwarn) -> None:
    write_folder(tmp_path, (file,))()
    pictures = open_pictures(f"folder:{tmp_path}", config=LIMITS)
    if file.data is None:
        (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": f"sub/{file.name}", "text": "x"}))
        pictures = open_pictures(f"folder:{tmp_path}", config=LIMITS)
    (ref,) = pictures.refs()
    if file.fault is not None:
        with pytest.raises(Quarantined) as fault:
            prepare_picture(pictures, ref, LIMITS)
        assert str(fault.value) == file.fault or (file.fault == "truncated" and fault.value.reason == "truncated")
        return
    ready = prepare_picture(pictures, ref, LIMITS)
    assert ready.caption == file.text and not recwarn.list
    assert sorted(ready.notes) == sorted(file.notes)
    assert file.pixels is not None
    shown = decode(pictures.load(ref), LIMITS).image
    assert np.abs(np.asarray(shown).astype(int) - file.pixels).max() <= file.tolerance
    assert ready.size == (WIDTH, HEIGHT)
    wanted = cut(Image.fromarray(file.pixels), choose_crop((WIDTH, HEIGHT), LIMITS))
    assert np.abs(ready.pixels.astype(int) - wanted).max() <= file.tolerance


def test_a_folder_of_all_of_them_is_surveyed(tmp_path: Path, capfd, recwarn) -> None:
    vanish = write_folder(tmp_path)
    pictures = open_pictures(f"folder:{tmp_path}", config=LIMITS)
    assert len(pictures.refs()) == len(hostile())
    vanish()
    found = survey(pictures, LIMITS, global_batch=8, num_threads=2)
    faults = {picture.key.rpartition("/")[2]: str(picture.fault) for picture in found.pictures if picture.fault}
    wanted = {file.name: file.fault for file in hostile() if file.fault}
    assert {name: text if wanted.get(name) != "truncated" else text.partition(":")[0] for name, text in faults.items()} == wanted
    assert len(found.used) == len(hostile()) - len(wanted)
    same = next(keys for keys in found.duplicates if any("duplicate" in key for key in keys))
    assert {"duplicate.png", "sub/plain.png"} <= set(same)
    out = capfd.readouterr()
    assert out.out == out.err == "" and not recwarn.list


def test_the_number_of_threads_changes_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path)()
    surveys = [survey(open_pictures(f"folder:{tmp_path}", config=LIMITS), LIMITS, 8, threads) for threads in (1, 3)]
    told = [[(p._replace(fault=None), str(p.fault)) for p in found.pictures] for found in surveys]
    assert told[0] == told[1] and surveys[0].plan == surveys[1].plan


def test_a_bomb_is_not_decoded():
    limits = LIMITS.model_copy(update={"max_pixels": 10_000})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        with pytest.raises(Quarantined, match="too many pixels"):
            decode(bomb(), limits)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


def test_the_bound_on_pixels_is_the_configurations_not_pillows(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings(record=True) as said:
        assert decode(saved(rgb(), "PNG"), LIMITS).image.size == (WIDTH, HEIGHT)
    assert not said
    with pytest.raises(Quarantined, match=r"96 x 64, encode\.max_pixels is 6,143"):
        decode(saved(rgb(), "PNG"), LIMITS.model_copy(update={"max_pixels": WIDTH * HEIGHT - 1}))


def test_the_colours_of_a_profile_become_srgb():
    other = srgb().replace(b"\0s\0R\0G\0B", b"\0o\0R\0G\0B")
    swapped = other.replace(b"rXYZ", b"oXYZ").replace(b"gXYZ", b"rXYZ").replace(b"oXYZ", b"gXYZ")
    assert other != srgb() and swapped != other
    picture = decode(saved(rgb(), "PNG", icc_profile=swapped), LIMITS)
    assert picture.notes == ("ICC profile: converted to sRGB",)
    assert np.abs(np.asarray(picture.image).astype(int) - scene()[:, :, [1, 0, 2]]).max() <= 2
    grey = decode(saved(rgb().convert("L"), "PNG", icc_profile=swapped), LIMITS)
    assert grey.notes == ("ICC profile left alone: of another colour space",)


def test_alpha_is_a_mask_where_it_is_asked_for():
    rgba = saved(Image.fromarray(np.dstack([scene(), alpha()])), "PNG")
    picture = decode(rgba, LIMITS.model_copy(update={"mask": "alpha"}))
    assert np.array_equal(np.asarray(picture.image), scene()), "colours under transparent pixels are left as they are"
    assert picture.alpha is not None and np.array_equal(np.asarray(picture.alpha), alpha())
    assert picture.notes == ("alpha is the mask",)


@pytest.mark.parametrize("cut_off", [0, 10, 25, 60, 200, 500])
def test_damaged_bytes_never_raise_anything_else(cut_off: int) -> None:
    generator = np.random.default_rng(cut_off)
    for file in hostile():
        if not file.data:
            continue
        data = bytearray(file.data[: len(file.data) - cut_off] if cut_off < len(file.data) else file.data)
        for place in generator.integers(0, len(data), 8):
            data[place] ^= int(generator.integers(1, 256))
        with contextlib.suppress(Quarantined):
            decode(bytes(data), LIMITS)


def test_a_mask_is_of_the_pictures_shape():
    mask = saved(Image.fromarray(alpha()), "PNG")
    assert np.array_equal(np.asarray(decode_mask(mask, LIMITS, (WIDTH, HEIGHT))), alpha())
    assert decode_mask(mask, LIMITS, (2 * WIDTH, 2 * HEIGHT)).size == (2 * WIDTH, 2 * HEIGHT)
    with pytest.raises(Quarantined, match="mask of another shape: 96 x 64, the picture 64 x 96"):
        decode_mask(mask, LIMITS, (HEIGHT, WIDTH))
    with pytest.raises(Quarantined, match="mask unreadable: zero bytes"):
        decode_mask(b"", LIMITS, (WIDTH, HEIGHT))


def test_reading_is_safe_from_several_threads():
    data, results = [file.data for file in hostile() if file.data and file.pixels is not None], []

    def work() -> None:
        results.append([np.asarray(decode(one, LIMITS).image).tobytes() for one in data])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == results[2]


def test_a_gif_shows_its_first_frame():
    one, two = (Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("blue", "red"))
    buffer = io.BytesIO()
    one.save(buffer, "GIF", save_all=True, append_images=[two])
    picture = decode(buffer.getvalue(), LIMITS)
    assert picture.image.getcolors() == [(WIDTH * HEIGHT, (0, 0, 255))] and picture.notes == ("several frames: the first",)
