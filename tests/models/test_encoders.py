"""Encoders of a pipeline against diffusers' own pipelines, bit for bit."""

from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch

from fluxray.errors import ConfigError
from fluxray.models.encoders import TextEncoder, VaeEncoder, default_text_layers, encoder_facts, token_counter
from fluxray.seeding import derive_seed
from tests.encode_helpers import tiny_pipeline
from tests.flow_pictures import TEXT_LAYERS, Encoders, pictures
from tests.flux_files import pipeline as whole_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
flux2_alone = pytest.mark.parametrize("encoders", ["flux2"], indirect=True)
LAYERS = {"flux1": None, "flux2": TEXT_LAYERS}


@pytest.fixture(scope="module", params=["flux1", "flux2"])
def encoders(request, tmp_path_factory) -> Encoders:
    return tiny_pipeline(request.param, tmp_path_factory.mktemp(request.param) / "pipeline")


def facts_of(encoders):
    return encoder_facts(f"path:{encoders.folder}", encoders.text_tokens, LAYERS[encoders.family])


def test_facts_are_those_of_a_cache_that_the_pipeline_encodes(encoders):
    facts, told = facts_of(encoders), encoders.facts()
    assert (facts.family, facts.channels, facts.text_width) == (told.family, told.channels, told.text_width)
    assert (facts.pooled_width, facts.pixels_per_token) == (told.pooled_width, told.pixels_per_token)
    assert (facts.text_layers, facts.statistics) == (told.text_layers, told.latent_statistics)


@torch.no_grad()
def test_texts_are_those_of_encode_prompt(encoders):
    encoder = TextEncoder(facts_of(encoders), torch.float32, CPU)
    captions = [*(picture.caption for picture in pictures()[:3]), "", "a red cat " * 100]
    keys = {} if encoders.family == "flux1" else {"text_encoder_out_layers": TEXT_LAYERS}
    made = encoder.embed(captions)
    text, *rest = encoders.pipeline.encode_prompt(captions, max_sequence_length=32, **keys)
    assert made.text.equal(text)
    assert made.pooled is None if encoders.family == "flux2" else made.pooled is not None and made.pooled.equal(rest[0])
    assert [encoder.num_cut(caption) > 0 for caption in captions] == [False] * 4 + [True]
    assert token_counter(facts_of(encoders))(captions[-1]) == 32 + encoder.num_cut(captions[-1])


@flux2_alone
@torch.no_grad()
def test_what_no_hidden_state_depends_on_is_dropped(encoders):
    keys = facts_of(encoders)
    encoder = TextEncoder(replace(keys, text_layers=(0, 1)), torch.float32, CPU)
    assert len(encoder.pipeline.text_encoder.model.layers) == 2 < len(encoders.pipeline.text_encoder.model.layers)
    text, _ = encoders.pipeline.encode_prompt("a cat", max_sequence_length=32, text_encoder_out_layers=(0, 1))
    assert encoder.embed(["a cat"]).text.equal(text)


def test_latents_are_those_of_the_image_processor_and_the_vae(encoders):
    vae = VaeEncoder(facts_of(encoders), torch.float32, CPU)
    for picture in pictures()[:4]:
        image = picture.image.convert("RGB").crop((10, 20, 10 + 80, 20 + 48))
        pixels = torch.from_numpy(np.array(image))[None]
        made = vae.latents(pixels, [derive_seed("posterior", picture.key)])
        assert made[0].equal(encoders.latents(picture.key, image, (48, 80)))


def test_a_picture_has_the_same_draw_in_any_batch(encoders):
    vae = VaeEncoder(facts_of(encoders), torch.float32, CPU)
    images = [picture.image.convert("RGB").crop((0, 0, 64, 64)) for picture in pictures()[:3]]
    pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images])
    together = vae.latents(pixels, [7, 8, 9])
    for number in range(3):
        torch.testing.assert_close(vae.latents(pixels[number : number + 1], [7 + number])[0], together[number], rtol=0, atol=1e-4)


def test_layers_are_those_of_the_pipelines_class():
    assert default_text_layers("FluxPipeline") == ()
    assert default_text_layers("Flux2KleinPipeline") == (9, 18, 27)
    assert default_text_layers("Flux2Pipeline") == (10, 20, 30)


@pytest.mark.parametrize(("case", "tokens"), [("flux1", 512), ("flux1 unguided", 256)])
def test_the_length_of_texts_is_that_which_the_model_was_made_for(case, tokens, tmp_path):
    assert encoder_facts(f"path:{whole_pipeline(case, tmp_path / 'pipeline')}").text_tokens == tokens


def test_pipelines_that_cannot_encode_are_refused_in_one_line(tmp_path, encoders):
    reference = f"path:{encoders.folder}"
    with pytest.raises(ConfigError, match=r"^model\.weights: .* is a transformer alone, .*; name the whole pipeline$"):
        encoder_facts(f"{reference}/transformer")
    if encoders.family == "flux1":
        with pytest.raises(ConfigError, match=r"^encode\.text_layers: \[1\], but a FluxPipeline reads the last layer alone; "):
            encoder_facts(reference, None, [1])
        return
    with pytest.raises(
        ConfigError, match=r"^encode\.text_layers: \[9, 18, 27\], which a Flux2KleinPipeline reads, but the .* has 4; set "
    ):
        encoder_facts(reference)
    with pytest.raises(ConfigError, match=r"make 64 where its transformer's joint_attention_dim is 96; name a pipeline whose"):
        encoder_facts(reference, None, [1, 2])


class MistralLike:
    """A processor as `Flux2Pipeline` calls it, around a tokenizer that knows one template."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def apply_chat_template(self, conversations, **keys):
        texts = [" ".join(part["content"][0]["text"] for part in turns) for turns in conversations]
        known = {key: keys[key] for key in ("padding", "truncation", "max_length", "return_tensors") if key in keys}
        return self.tokenizer(texts, **known)


@flux2_alone
@torch.no_grad()
def test_mistrals_texts_are_counted_with_their_system_message(encoders):
    own = encoders.pipeline
    encoder = TextEncoder(facts_of(encoders), torch.float32, CPU)
    processor = MistralLike(own.tokenizer)
    encoder.pipeline = diffusers.Flux2Pipeline(own.scheduler, own.vae, encoder.pipeline.text_encoder, processor, None)
    message = encoder.pipeline.system_message
    caption = "a red cat"
    whole = len(own.tokenizer(f"{message} {caption}").input_ids)
    assert encoder.num_cut(caption) == whole - 32 > 0
    reference = diffusers.Flux2Pipeline(own.scheduler, own.vae, own.text_encoder, processor, None)
    text, _ = reference.encode_prompt(caption, max_sequence_length=32, text_encoder_out_layers=TEXT_LAYERS)
    assert encoder.embed([caption]).text.equal(text)
