"""`fluxray encode`: its checks, its progress, and one encoding on Ray that is the same to the byte as one without."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from fluxray import cli
from fluxray.config.load import resolve
from fluxray.errors import ConfigError, DataError, PlanError
from fluxray.runtime import cluster
from fluxray.runtime.encode import Progress, RayPasses, _explained, encode_ahead, prepare
from fluxray.runtime.outcome import FailedError
from fluxray.tasks.encode import Pass
from fluxray.tasks.encode_pictures import ReadPictures, WriteLatents
from tests.encode_helpers import SETTINGS, encode_here, encode_until_killed, job_of, tiny_pipeline, write_photos
from tests.tasks.test_encode import content

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pipeline in `pipeline` and pictures in `photos`."""
    folder = tmp_path_factory.mktemp("encode")
    encoders = tiny_pipeline("flux1", folder / "pipeline")
    return encoders, write_photos(folder / "photos", 6)


def words(encoders, photos, cache, **more):
    keys = {"model.weights": f"path:{encoders.folder}", "data.source": f"folder:{photos}", "data.cache": str(cache)}
    keys |= {f"encode.{key}": value for key, value in SETTINGS.items()} | more
    return {key: value for key, value in keys.items() if value is not None}


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("flux1-tiny", {"model.weights": None}, r"^model\.weights: null, and a preset has no encoders; set model\.weights=path"),
        ("flux1-tiny", {"data.cache": None}, r"^data\.cache: null, but encoded pictures must go somewhere; set data\.cache=F"),
        ("flux1-tiny", {"data.source": None}, r"^data\.source: builtin:topics holds no pictures; set one, such as data\.sour"),
        (
            "flux1-tiny",
            {"encode.mask": "file", "data.source": "parquet:rows.parquet"},
            r"^encode\.mask: 'file', but the rows of parquet:rows\.parquet have no files beside them; set encode\.mask=alpha or ",
        ),
        ("flux1-tiny", {"resources.gpu": 0.5}, r"^resources\.gpu: 0\.5, but each worker's encoders take one card; set "),
        ("flux1-tiny", {"data.cache": "hf:cache"}, r"^data\.cache: 'hf:cache' is no folder; name one"),
        ("flux1-dev", {}, r"^model\.config\.\w+: .* path:.*"),
        ("flux1-tiny", {"encode.text_tokens": 513}, r"^encode\.text_tokens: 513 .*at most 512"),
    ],
)  # fmt: skip
def test_what_an_encoding_lacks_is_said_in_one_line(folders, tmp_path, model, change, message):
    with pytest.raises(ConfigError, match=message) as found:
        prepare(resolve("cpu", model, words(*folders, tmp_path / "cache", **change)))
    assert "\n" not in str(found.value) and not (tmp_path / "cache").exists()


def test_text_is_not_encoded(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^task\.kind: 'lm', and pictures are for flow; choose a model, such as --model flux1-dev$"
    ):
        prepare(resolve("cpu", "lm-tiny"))


def test_the_job_script_is_the_command(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "jobs" / "encode.py"),
        "--profile",
        "cpu",
        "--model",
        "flux1-tiny",
        "encode.resolutoin=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "fluxray: error: encode.resolutoin: unknown key; did you mean encode.resolution?\n",
    )


def test_progress_has_a_rate_and_the_time_left():
    now, said = [0.0], []
    progress = Progress(said.append, lambda: now[0])
    for second, done in ((0, 0), (20, 100), (22, 200), (30, 300), (40, 1000)):
        now[0] = float(second)
        progress("pictures", done, 1000)
    progress("captions", 0, 3)
    assert said == [
        "pictures: starting encoders for 1,000",
        "pictures 100/1,000",
        "pictures 300/1,000  20.0/s  0:35 left",
        "pictures 1,000/1,000  45.0/s",
        "captions: starting encoders for 3",
    ]


class Broken:
    """A stage that fails on its worker."""

    def __init__(self, job):
        self.job = job

    def __call__(self, row):
        raise RuntimeError("something\nelse")


def test_a_fault_of_the_user_comes_back_from_its_worker_as_one(tmp_path):
    fault = DataError("data.source: a fault that a worker met; mend it\nFailed to apply UDF transform after 1/1 attempts")
    found = _explained(RayTaskError("_call", "", fault), "pictures", tmp_path / "story")
    assert type(found) is DataError and str(found) == "data.source: a fault that a worker met; mend it"
    full = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    found = _explained(RayTaskError("_call", "", full), "captions", tmp_path / "story")
    assert type(found) is PlanError and str(found).startswith(
        "encode.batch_captions: too many for the device (CUDA out of memory."
    )
    assert not (tmp_path / "story").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_an_encoding_that_was_killed_ends_with_the_bytes_of_one_without_ray(folders, tmp_path, monkeypatch, capsys):
    encoders, photos = folders
    monkeypatch.setenv("RAY_ADDRESS", "")
    expected, cache = tmp_path / "expected", tmp_path / "cache"
    encode_here(job_of(encoders, photos, expected))
    encode_until_killed(job_of(encoders, photos, cache), 1)
    assert len(list((cache / ".encoding").glob("*.safetensors"))) == 1
    config = resolve("cpu", "flux1-tiny", words(encoders, photos, cache))
    pairs = [f"{key}={value}" for key, value in words(encoders, photos, cache).items()]
    with cluster.session(verbose=False):
        with pytest.raises(SystemExit) as end:
            cli.main(["encode", "--profile=cpu", "--model=flux1-tiny", *pairs])
        assert end.value.code == 0
        assert content(cache) == content(expected)
        told = capsys.readouterr().out.splitlines()
        assert told[1].startswith(f"6 pictures, to be encoded by path:{encoders.folder} into {cache}")
        assert told[-1].startswith(f"{cache}: 6 samples in 2 shards") and "7 captions at" in told[-1]
        assert (cache / "report" / "pictures.png").stat().st_size > 0
        job = job_of(encoders, photos, tmp_path / "other")
        passes = RayPasses(config, None, verbose=False)
        with pytest.raises(FailedError, match=r"^encoding pictures failed: RuntimeError: something else; the same command goes"):
            list(passes(job, Pass("pictures", [{"shard": None}], Broken, ReadPictures, WriteLatents)))
        assert "something" in (job.cache / "failure.txt").read_text()
    assert encode_ahead(config).captions == 0, "nothing is to be encoded, and Ray is not started"
