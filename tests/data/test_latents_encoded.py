"""Real pictures through the encoders of a pipeline: the rows of their cache are what diffusers' own pipelines make of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, Flux2KleinPipeline, FluxImg2ImgPipeline, FluxPipeline
from safetensors.torch import load_file, save_file

from fluxray.data.identity import weights_identity, with_pipeline
from fluxray.data.latent_facts import CacheNeeds, check_cache
from fluxray.data.latents import LatentCache
from fluxray.errors import ConfigError, DataError
from fluxray.seeding import derive_seed
from tests.flow_pictures import SIZES, TEXT_LAYERS, Encoders, pictures, tiny_encoders, write_pictures

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def flux1(tmp_path_factory) -> Encoders:
    return write_pictures(tmp_path_factory.mktemp("flux1"), "flux1")


@pytest.fixture(scope="module")
def flux2(tmp_path_factory) -> Encoders:
    return write_pictures(tmp_path_factory.mktemp("flux2"), "flux2")


def pixels_of(encoders, index):
    """Return the pixels of a picture as the pipeline's image processor makes them, and their size."""
    size = SIZES[index % 3]
    return encoders.pipeline.image_processor.preprocess(pictures()[index].image, *size, resize_mode="crop"), size


@torch.no_grad()
def test_rows_of_flux1_are_latents_and_texts_of_its_pipelines(flux1):
    cache, pipeline = LatentCache(flux1.cache), flux1.pipeline
    assert len(cache) == 15
    for index in (0, 1, 2, 7):
        row = cache[index]
        pixels, (height, width) = pixels_of(flux1, index)
        draw = torch.Generator().manual_seed(derive_seed("posterior", row.key))
        image_to_image = FluxImg2ImgPipeline._encode_vae_image
        latents = image_to_image(pipeline, pixels, draw)
        packed = FluxPipeline._pack_latents(latents, 1, 16, height // 8, width // 8)[0]
        torch.testing.assert_close(row.latents, packed, rtol=0, atol=1e-6)
        unpacked = FluxPipeline._unpack_latents(row.latents[None], height, width, pipeline.vae_scale_factor)
        torch.testing.assert_close(unpacked, latents, rtol=0, atol=1e-6)
        caption = cache.caption(index)
        text, pooled, ids = pipeline.encode_prompt(caption, caption, max_sequence_length=32)
        assert row.text.equal(text[0].bfloat16()) and len(ids) == len(row.text) == 32
        assert row.pooled is not None and row.pooled.equal(pooled[0].bfloat16())
    text, pooled, _ = pipeline.encode_prompt("", "", max_sequence_length=32)
    empty = cache.empty[32]
    assert empty.text.equal(text[0].bfloat16()) and empty.pooled is not None and empty.pooled.equal(pooled[0].bfloat16())


@torch.no_grad()
def test_rows_of_flux2_are_latents_and_texts_of_its_pipeline(flux2):
    cache, pipeline = LatentCache(flux2.cache), flux2.pipeline
    for index in (0, 1, 2, 7):
        row = cache[index]
        pixels, (height, width) = pixels_of(flux2, index)
        latents = pipeline._encode_vae_image(pixels, torch.Generator())
        torch.testing.assert_close(row.latents, Flux2KleinPipeline._pack_latents(latents)[0], rtol=0, atol=1e-5)
        assert (row.height, row.width) == (height // 16, width // 16) == tuple(latents.shape[2:])
        ids = Flux2KleinPipeline._prepare_latent_ids(latents)
        unpacked = Flux2KleinPipeline._unpack_latents_with_ids(row.latents[None], ids)
        torch.testing.assert_close(unpacked, latents, rtol=0, atol=1e-5)
        text, _ = pipeline.encode_prompt(cache.caption(index), max_sequence_length=32, text_encoder_out_layers=TEXT_LAYERS)
        assert row.text.equal(text[0].bfloat16()) and row.pooled is None
    text, _ = pipeline.encode_prompt("", max_sequence_length=32, text_encoder_out_layers=TEXT_LAYERS)
    assert cache.empty[32].text.equal(text[0].bfloat16())


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_latents_are_normalised_and_facts_say_by_what(family, request, tmp_path):
    encoders: Encoders = request.getfixturevalue(family)
    cache = LatentCache(encoders.cache)
    tokens = torch.cat([cache[index].latents for index in range(len(cache))])
    assert abs(float(tokens.mean())) < 0.1 and abs(float(tokens.std()) - 1) < 0.1
    vae = encoders.pipeline.vae
    if family == "flux1":
        expected = {"shift": [vae.config.shift_factor], "scale": [vae.config.scaling_factor]}
    else:
        expected = {"mean": vae.bn.running_mean, "std": torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)}
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(cache.facts.latent_statistics[name]), torch.as_tensor(values))
    assert cache.facts.vae == weights_identity(encoders.folder / "vae", "data.cache")
    again = tiny_encoders(family, tmp_path)
    assert again.facts().to_json() == {**cache.facts.to_json(), "text_lengths": (), "resolutions": ()}


def test_both_layouts_give_equal_rows(flux2, tmp_path):
    cut = write_pictures(tmp_path, "flux2", "webdataset").cache
    one, other = LatentCache(flux2.cache), LatentCache(cut)
    assert list(cut.glob("*.tar")) and one.facts == other.facts and len(one) == len(other)
    for index in range(len(one)):
        left, right = one[index], other[index]
        assert left.latents.equal(right.latents) and left.text.equal(right.text) and left.key == right.key
        assert one.caption(index) == other.caption(index)


def test_weights_are_known_again_in_any_dtype_and_number_of_files(flux1, tmp_path):
    identity = weights_identity(flux1.folder / "text_encoder_2", "model.weights")
    encoder = flux1.pipeline.text_encoder_2
    encoder.save_pretrained(tmp_path / "cut", max_shard_size="50KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    assert weights_identity(tmp_path / "cut", "model.weights") == identity
    vae = AutoencoderKL.from_pretrained(flux1.folder / "vae")
    vae.bfloat16().save_pretrained(tmp_path / "half")
    assert weights_identity(tmp_path / "half", "model.weights") == weights_identity(flux1.folder / "vae", "model.weights")
    vae.decoder.conv_in.weight.data[0] += 1
    vae.save_pretrained(tmp_path / "other")
    assert weights_identity(tmp_path / "other", "model.weights") != weights_identity(flux1.folder / "vae", "model.weights")


@pytest.mark.parametrize(("family", "widths"), [("flux1", (64, 64, 32)), ("flux2", (128, 96, None))])
def test_a_cache_belongs_to_the_pipeline_that_encoded_it(family, widths, request, tmp_path):
    encoders: Encoders = request.getfixturevalue(family)
    facts = LatentCache(encoders.cache).facts
    alone = CacheNeeds(family, *widths)
    needs = with_pipeline(alone, encoders.folder)
    assert needs.vae and needs.text_encoders.keys() == facts.text_encoders.keys()
    check_cache(facts, needs)
    assert with_pipeline(alone, tmp_path) == alone
    shutil.copytree(encoders.folder, tmp_path / "other")
    vae = tmp_path / "other" / "vae"
    tensors = load_file(vae / "diffusion_pytorch_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, vae / "diffusion_pytorch_model.safetensors")
    with pytest.raises(
        ConfigError, match=rf"^data\.cache: encoded by VAE {facts.vae}, the model's is (?!{facts.vae})[0-9a-f]{{16}};"
    ):
        check_cache(facts, with_pipeline(alone, tmp_path / "other"))
    shutil.copytree(encoders.folder / "vae", vae, dirs_exist_ok=True)
    shutil.copytree(encoders.folder / "vae", tmp_path / "other" / "text_encoder", dirs_exist_ok=True)
    (tmp_path / "other" / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"^data\.cache: text_encoder of the cache is {facts.text_encoders['text_encoder']}, "):
        check_cache(facts, with_pipeline(alone, tmp_path / "other"))


def test_the_scaling_of_latents_is_read_from_the_vae(flux1, tmp_path):
    shutil.copytree(flux1.folder, tmp_path / "other")
    config = tmp_path / "other" / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "scaling_factor": 0.3611}))
    scale = flux1.pipeline.vae.config.scaling_factor
    with pytest.raises(ConfigError, match=rf"^data\.cache: latent scale is {scale:g}, the model's 0\.3611; name a cache"):
        check_cache(LatentCache(flux1.cache).facts, with_pipeline(CacheNeeds("flux1", 64, 64, 32), tmp_path / "other"))
    config.write_text("{")
    with pytest.raises(DataError, match=r"^model\.weights: .*config\.json is damaged; copy it again$"):
        with_pipeline(CacheNeeds("flux1", 64, 64, 32), tmp_path / "other")


def test_folders_without_whole_weights_are_refused(flux1, tmp_path: Path):
    with pytest.raises(DataError, match=r"^model\.weights: .* has 0 safetensors files and no index; name a folder of one model$"):
        weights_identity(tmp_path, "model.weights")
    whole = next((flux1.folder / "vae").glob("*.safetensors")).read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"^model\.weights: the weights in .* are damaged; copy them again$"):
        weights_identity(tmp_path, "model.weights")
