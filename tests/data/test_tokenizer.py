import json

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fluxray.data.tokenizer import (
    EOS_TOKEN,
    PAD_TOKEN,
    check_fits,
    load_tokenizer,
    num_entries,
    tokenizer_fingerprint,
    train_tokenizer,
    trained_size,
)
from fluxray.errors import ConfigError, DataError

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 20, "Ünïcödé, 日本語, \ttabs\n\n  and 'quotes' 🙂 "]


def test_trained_tokenizer_survives_saving_and_loading(tmp_path):
    trained = train_tokenizer(TEXTS, 300)
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(f"path:{tmp_path}", "data.tokenizer")
    for text in TEXTS:
        ids = trained.encode(text)
        assert loaded.encode(text) == ids
        assert loaded.decode(ids) == text
    assert (loaded.eos_token, loaded.bos_token, loaded.pad_token) == (EOS_TOKEN, EOS_TOKEN, PAD_TOKEN)
    assert num_entries(loaded) == num_entries(trained) <= 300
    assert AutoTokenizer.from_pretrained(tmp_path).encode(TEXTS[0]) == trained.encode(TEXTS[0])


def test_training_is_deterministic_and_follows_the_text():
    first, again, other = (tokenizer_fingerprint(train_tokenizer(texts, 300)) for texts in (TEXTS, TEXTS, TEXTS[1:]))
    assert first == again != other


def test_short_text_gives_a_smaller_vocabulary():
    assert num_entries(train_tokenizer(["ab"], 1000)) == 259


@pytest.mark.parametrize(
    ("wanted", "model", "size"), [(None, None, 8192), (None, 4096, 4096), (300, None, 300), (300, 4096, 300)]
)
def test_size_of_a_trained_tokenizer(wanted, model, size):
    assert trained_size(wanted, model) == size


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        (lambda: trained_size(5000, 4096), ["4096", "data.vocab_size 5000", "lower"]),
        (lambda: trained_size(None, 100), ["100", "258", "data.tokenizer"]),
        (lambda: check_fits(5000, 4096, "path:/t"), ["4096", "5000", "path:/t", "raise it"]),
    ],
)
def test_tokenizer_beyond_the_model_is_refused(fault, parts):
    with pytest.raises(ConfigError) as raised:
        fault()
    message = str(raised.value)
    assert message.startswith("model.config.vocab_size: ") and "\n" not in message
    assert all(part in message for part in parts), message


def save_without_eos(folder):
    vocabulary = {"a": 0, "b": 1}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a"))).save_pretrained(folder)


def save_config_alone(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))


FAULTS = {
    "no folder": (lambda folder: folder.rmdir(), ["no such folder"]),
    "empty folder": (lambda folder: None, ["no tokenizer can be loaded"]),
    "config alone": (save_config_alone, ["no vocabulary"]),
    "broken": (lambda folder: (folder / "tokenizer.json").write_text("{"), ["no tokenizer can be loaded"]),
    "no eos": (save_without_eos, ["end-of-sequence", "eos_token"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_folder_without_a_usable_tokenizer_is_refused(tmp_path, fault):
    spoil, parts = FAULTS[fault]
    folder = tmp_path / "tok"
    folder.mkdir()
    spoil(folder)
    with pytest.raises(DataError) as raised:
        load_tokenizer(f"path:{folder}", "data.tokenizer")
    message = str(raised.value)
    assert message.startswith(f"data.tokenizer: path:{folder}: ") and "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("reference", ["tok", "hf:", "builtin:topics"])
def test_other_forms_are_refused(reference):
    with pytest.raises(DataError, match=r"is no tokenizer; use train, path:DIR or hf:NAME"):
        load_tokenizer(reference, "data.tokenizer")
