import json
import pickle
import zlib

import numpy as np
import pytest
import torch

from fluxray.data.latent_facts import CacheNeeds, LatentFacts, check_cache
from fluxray.data.latent_shards import LatentSample, finish_cache, index_path, write_cache, write_shard
from fluxray.data.latents import LatentCache, load_latents
from fluxray.errors import ConfigError, DataError
from tests.flow_caches import empty_captions, random_cache, random_facts, random_samples

BUCKETS = {(64, 64, 6): 7, (32, 64, 6): 5, (64, 32, 4): 4}
NEEDS = CacheNeeds("flux1", 8, 12, 10)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    random_cache(folder, BUCKETS)
    return folder


@pytest.fixture
def copy(cache_dir, tmp_path):
    """A copy of the cache that a test may damage."""
    for path in cache_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(path, change):
    """Change the values of a JSON file of a cache and sign it anew."""
    values = json.loads(path.read_text())
    del values["crc32"]
    change(values)
    path.write_text(json.dumps({**values, "crc32": zlib.crc32(json.dumps(values).encode())}))


@pytest.mark.parametrize("layout", ["safetensors", "webdataset"])
@pytest.mark.parametrize("text_dtype", ["float32", "bfloat16"])
def test_rows_are_what_was_written(tmp_path, layout, text_dtype):
    facts = random_facts(text_dtype=text_dtype)
    samples = random_samples(facts, BUCKETS)
    write_cache(tmp_path, facts, empty_captions(facts, [4, 6]), iter(samples), layout, shard_bytes=3000)
    cache = LatentCache(tmp_path)
    assert len(cache) == len(samples) == 16 and len(list(tmp_path.glob("shard-*.index.json"))) > 2
    for index, sample in enumerate(samples):
        row = cache[index]
        assert (row.height, row.width) == (sample.height // 16, sample.width // 16)
        assert row.latents.dtype == torch.float32 and row.latents.equal(sample.latents)
        assert row.text.dtype == getattr(torch, text_dtype) and row.text.equal(sample.text.to(row.text.dtype))
        assert row.pooled is not None and sample.pooled is not None and row.pooled.equal(sample.pooled.to(row.text.dtype))
        assert row.weight == 1 and row.key == sample.key == cache.key(index) and cache.caption(index) == sample.caption
        assert cache.row_lengths[index] == len(row.latents) + len(row.text)
    with pytest.raises(IndexError):
        cache[16]


def test_facts_and_empty_captions_are_given_back(cache_dir):
    cache = LatentCache(cache_dir)
    assert cache.facts.text_lengths == (4, 6) and cache.facts.resolutions == ((32, 64), (64, 32), (64, 64))
    assert LatentFacts.from_json(json.loads(json.dumps(cache.facts.to_json()))) == cache.facts
    assert {length: (tuple(text.shape), float(text.mean())) for length, (text, _) in cache.empty.items()} == {
        4: ((4, 12), 1.0),
        6: ((6, 12), 1.0),
    }
    again = pickle.loads(pickle.dumps(cache))
    assert again[3].latents.equal(cache[3].latents) and len(pickle.dumps(cache)) < 500


def test_buckets_are_those_of_size_and_text_length(cache_dir):
    cache = LatentCache(cache_dir)
    of_bucket = {}
    for index, bucket in enumerate(cache.bucket_of.tolist()):
        row = cache[index]
        of_bucket.setdefault(bucket, []).append((row.height * 16, row.width * 16, len(row.text)))
    assert {rows[0]: len(rows) for rows in of_bucket.values()} == BUCKETS
    assert all(len(set(rows)) == 1 for rows in of_bucket.values())


def test_flux2_has_no_pooled_text(tmp_path):
    samples = random_cache(tmp_path, {(32, 32, 3): 4}, family="flux2", pooled_width=None, text_encoders={"text_encoder": "qwen"})
    assert all(LatentCache(tmp_path)[i].pooled is None for i in range(len(samples)))


def test_latents_may_be_stored_in_half_the_bytes(tmp_path):
    samples = random_cache(tmp_path, {(32, 32, 3): 4}, latent_dtype="bfloat16")
    row = LatentCache(tmp_path)[0]
    assert row.latents.dtype == torch.float32 and row.latents.equal(samples[0].latents.bfloat16().float())


def test_samples_may_share_memory(tmp_path):
    facts = random_facts()
    whole = torch.randn(4, 4, 8)
    text, pooled = torch.randn(5, 12), torch.randn(10)
    samples = [LatentSample(f"s{i}", "the same", 32, 32, latents, text, pooled) for i, latents in enumerate([*whole, whole[0]])]
    write_cache(tmp_path, facts, empty_captions(facts, [5]), samples)
    cache = LatentCache(tmp_path)
    assert all(cache[i].latents.equal(whole[i % 4]) and cache[i].text.equal(text) for i in range(5))


def test_a_tar_follows_the_conventions_of_webdataset(tmp_path):
    import tarfile

    from safetensors.torch import load

    facts = random_facts()
    samples = random_samples(facts, BUCKETS)
    write_shard(tmp_path, "shard-00000", facts, samples, "webdataset")
    with tarfile.open(tmp_path / "shard-00000.tar") as tar:
        members = tar.getmembers()
        names = [f"{sample.key}.{suffix}" for sample in samples for suffix in ("safetensors", "json")]
        assert [member.name for member in members] == names  # members of a sample are neighbours of one stem
        tensors, told = (tar.extractfile(member).read() for member in members[:2])  # type: ignore[union-attr]
    assert load(tensors)["latents"].equal(samples[0].latents)
    assert json.loads(told)["caption"] == samples[0].caption


def test_shards_of_an_interrupted_writer_are_not_seen(tmp_path, monkeypatch):
    facts = random_facts()
    samples = random_samples(facts, BUCKETS)

    def dying():
        yield from samples[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_cache(tmp_path, facts, empty_captions(facts, [4, 6]), dying(), shard_bytes=1)
    with pytest.raises(DataError, match=r"^data\.cache: .* has no cache\.json; encode to the end, or copy it again$"):
        LatentCache(tmp_path)
    monkeypatch.setattr("fluxray.data.latent_shards.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # after the shard's file, before its index
        write_shard(tmp_path, "shard-00099", facts, samples[:3], "safetensors")
    monkeypatch.undo()
    assert (tmp_path / "shard-00099.safetensors").exists() and not list(tmp_path.glob("*.partial"))
    with pytest.raises(DataError, match=r"shard-00099\.safetensors has no shard-00099\.index\.json"):
        finish_cache(tmp_path, facts, empty_captions(facts, [4, 6]), ["shard-00000.safetensors", "shard-00099.safetensors"])
    write_shard(tmp_path, "shard-00099", facts, samples[5:9], "safetensors")
    finish_cache(tmp_path, facts, empty_captions(facts, [4, 6]), ["shard-00000.safetensors", "shard-00099.safetensors"])
    assert [LatentCache(tmp_path).key(i) for i in range(5)] == [sample.key for sample in (samples[0], *samples[5:9])]


def test_a_folder_that_is_no_cache_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"^data\.cache: .*nowhere: no such folder; check the path, or encode"):
        LatentCache(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"^data\.eval_cache: .* has no cache\.json"):
        LatentCache(tmp_path, "data.eval_cache")


def test_a_cache_of_another_format_is_refused(copy):
    edit(copy / "cache.json", lambda values: values.update(format=2))
    with pytest.raises(DataError, match=r"^data\.cache: .* has format 2, this fluxray reads 1; use the other version$"):
        LatentCache(copy)


@pytest.mark.parametrize("name", ["cache.json", "shard-00001.index.json"])
def test_damaged_words_are_found_out(copy, name):
    text = (copy / name).read_text()
    (copy / name).write_text(text.replace("0", "1", 1))
    with pytest.raises(DataError, match=rf"{name} is damaged; copy or encode it again$"):
        LatentCache(copy)


def test_names_that_leave_the_folder_are_refused(copy):
    edit(copy / "cache.json", lambda values: values["shards"][0].update(file="../shard-00000.safetensors"))
    with pytest.raises(DataError, match="names no shards of its folder"):
        LatentCache(copy)


def test_missing_and_short_shards_are_named(copy):
    shard = copy / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    size = len(content)
    with pytest.raises(
        DataError, match=rf"shard-00001\.safetensors has {size - 1} bytes instead of {size}; copy or encode it again$"
    ):
        LatentCache(copy)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001\.safetensors is missing; copy or encode it again$"):
        LatentCache(copy)
    (copy / "shard-00001.index.json").unlink()
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00001\.safetensors has no shard-00001\.index\.json"):
        LatentCache(copy)


def test_a_damaged_sample_is_named_and_the_others_are_read(copy):
    shard = copy / "shard-00001.safetensors"
    first = json.loads(index_path(copy, shard.name).read_text())["samples"][0]
    content = bytearray(shard.read_bytes())
    content[first["text"][0] + 3] ^= 1
    shard.write_bytes(content)
    cache = LatentCache(copy)
    damaged = next(i for i in range(len(cache)) if cache.key(i) == first["key"])
    with pytest.raises(DataError, match=rf"shard-00001\.safetensors is damaged at sample {first['key']}; copy or encode"):
        cache[damaged]
    assert all(cache[i].height for i in range(len(cache)) if i != damaged)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001\.safetensors cannot be read \(No such file"):
        cache[damaged]


def test_samples_that_do_not_agree_with_the_facts_are_named(copy):
    def widen(values):
        values["samples"][0]["text"][1][1] = 16

    def make_odd(values):
        values["samples"][0]["height"] = 40

    path = copy / "shard-00000.index.json"
    before = path.read_text()
    edit(path, widen)
    with pytest.raises(
        DataError, match=r"sample noise-0000 has text of width 16, the cache's is 12; encode all samples with one"
    ):
        LatentCache(copy)
    path.write_text(before)
    edit(path, make_odd)
    with pytest.raises(DataError, match=r"sample noise-0000 has 40x\d+ pixels, no multiples of 16; resize or crop it first"):
        LatentCache(copy)


def test_embeddings_of_no_caption_are_needed(copy, tmp_path):
    facts = random_facts()
    samples = random_samples(facts, BUCKETS)
    with pytest.raises(DataError, match="no embedding of an empty caption of 4 tokens; encode '' at each text length"):
        write_cache(tmp_path / "new", facts, empty_captions(facts, [6]), samples)
    (copy / "empty.safetensors").unlink()
    with pytest.raises(DataError, match=r"empty\.safetensors is missing or damaged"):
        LatentCache(copy)


def test_a_writer_refuses_what_does_not_fit(tmp_path):
    facts = random_facts()
    first, second, *_ = random_samples(facts, {(32, 32, 4): 3})
    for sample, message in (
        (first._replace(key="a.b"), r"'a\.b': a key has 1 to 80 letters"),
        (first._replace(height=33), "has 33x32 pixels, no multiples of 16"),
        (first._replace(text=torch.zeros(4, 16)), r"text of shape \(4, 16\), the cache's is \(4, 12\)"),
        (first._replace(pooled=None), r"pooled of shape None, the cache's is \(10,\)"),
        (
            first._replace(text=first.text / 0),
            "text has values that are not finite; encode in fp32 or bf16, or leave the picture out",
        ),
        (first._replace(latents=torch.zeros(5, 8)), r"latents of shape \(5, 8\), the cache's is \(4, 8\)"),
    ):
        with pytest.raises(DataError, match=rf"^data\.cache: sample .*{message}"):
            write_shard(tmp_path, "shard-00000", facts, [sample], "safetensors")
    with pytest.raises(DataError, match="two samples of one key"):
        write_shard(tmp_path, "shard-00000", facts, [first, second._replace(key=first.key)], "safetensors")
    with pytest.raises(DataError, match=rf"repeats the sample {first.key} of another shard"):
        write_cache(tmp_path, facts, empty_captions(facts, [4]), [first, second._replace(key=first.key)], shard_bytes=1)
    with pytest.raises(DataError, match="gets no sample"):
        write_cache(tmp_path, facts, [], [])
    write_cache(tmp_path, facts, empty_captions(facts, [4]), [first])
    with pytest.raises(DataError, match="holds a cache already"):
        write_cache(tmp_path, facts, empty_captions(facts, [4]), [first])


REMEDY = "; name a cache of this model, or encode one with its VAE and text encoders$"


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"family": "flux2"}, r"the family of the cache is flux1, the model's flux2" + REMEDY),
        ({"channels": 64}, r"latent channels per token of the cache is 8, the model's 64" + REMEDY),
        ({"text_width": 4096}, r"text width of the cache is 12, the model's 4096" + REMEDY),
        ({"pooled_width": None}, r"pooled text width of the cache is 10, the model's none" + REMEDY),
        ({"vae": "other"}, r"encoded by VAE vae-of-noise, the model's is other" + REMEDY),
        ({"text_encoders": {"text_encoder_2": "x"}}, r"text_encoder_2 of the cache is t5-of-noise, the model's x" + REMEDY),
        ({"text_layers": (9, 18)}, r"text is of layers none, the model reads 9, 18" + REMEDY),
        ({"latent_statistics": {"shift": (0.1159,)}}, r"latent shift is 0, the model's 0\.1159" + REMEDY),
        ({"latent_statistics": {"mean": (0.0, 1.0)}}, r"latent mean of the cache has 0 numbers, the model's 2" + REMEDY),
        ({"text_lengths": (6, 256)}, "texts of 4 tokens, the model's have 6, 256; encode them at this length$"),
        ({"resolutions": ((64, 64), (32, 64))}, "pictures of 64x32 pixels, wanted are 64x64, 32x64; encode them at this"),
    ],
)
def test_a_cache_of_another_model_is_refused_with_both_values(cache_dir, needs, message):
    facts = LatentCache(cache_dir).facts
    fields = {**{name: getattr(NEEDS, name) for name in NEEDS.__dataclass_fields__}, **needs}
    with pytest.raises(ConfigError, match=rf"^data\.cache: {message}"):
        check_cache(facts, CacheNeeds(**fields))


def test_a_cache_of_the_model_is_accepted(cache_dir):
    facts = LatentCache(cache_dir).facts
    check_cache(facts, NEEDS)
    check_cache(facts, CacheNeeds.of_cache(facts))


def test_held_out_pictures_depend_on_keys_alone(tmp_path):
    facts = random_facts()
    samples = random_samples(facts, {(32, 32, 4): 40})

    def held_out(name, of):
        write_cache(tmp_path / name, facts, empty_captions(facts, [4]), of, shard_bytes=2000)
        data = load_latents(tmp_path / name, None, 0.25, NEEDS)
        keys = [{row.key for row in rows} for rows in data[:2]]
        assert keys[0].isdisjoint(keys[1]) and len(keys[0] | keys[1]) == len(of) == len(data.train) + len(data.evaluation)
        return keys[1]

    first = held_out("one", samples)
    assert len(first) == 10 and held_out("two", samples[::-1]) == first
    grown = held_out("three", samples[:30])
    assert len(grown & first) >= 5
    few = load_latents(tmp_path / "one", None, 0.001, NEEDS)
    assert (len(few.train), len(few.evaluation)) == (39, 1)
    assert "training 39 pictures, held out 1; flux1 latents of 32x32 pixels, texts of 4 tokens" in few.summary()
    with pytest.raises(DataError, match=r"data\.eval_fraction: 0\.99 of 40 samples leaves none to train on"):
        load_latents(tmp_path / "one", None, 0.99, NEEDS)


def test_a_held_out_cache_is_of_the_same_making(cache_dir, tmp_path):
    random_cache(tmp_path / "more", {(32, 32, 3): 4}, seed=1)
    data = load_latents(cache_dir, tmp_path / "more", 0.5, NEEDS)
    assert (len(data.train), len(data.evaluation)) == (16, 4)
    assert np.array_equal(data.train.buckets, LatentCache(cache_dir).bucket_of)
    random_cache(tmp_path / "other", {(32, 32, 3): 4}, vae="another")
    with pytest.raises(ConfigError, match=r"^data\.eval_cache: encoded by VAE another, the model's is vae-of-noise"):
        load_latents(cache_dir, tmp_path / "other", 0.5, NEEDS)
