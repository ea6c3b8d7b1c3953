import itertools

import numpy as np
import pytest
from transformers import AutoTokenizer

from fluxray.config.schema import DataConfig
from fluxray.data.text import prepare_text
from fluxray.data.tokenizer import train_tokenizer
from fluxray.errors import ConfigError, DataError
from fluxray.protocols import IGNORE_INDEX


@pytest.fixture
def corpus(tmp_path):
    """Twelve files of different length, and a path to all of them."""
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(f"This is document {number}. " * (number + 2))
    return f"path:{tmp_path}/*.txt"


def prepare(tmp_path, default_tokenizer: str | None = None, model_vocab: int | None = 300, **keys):
    return prepare_text(DataConfig(max_slice=16, **keys), tmp_path / "cache", default_tokenizer, model_vocab)


def text_of(rows, tokenizer):
    """Return the text of all rows, put together again."""
    tokens = itertools.chain.from_iterable(row.input_ids for row in rows)
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


@pytest.mark.parametrize("packing", [True, False])
def test_parts_hold_all_tokens_and_the_stated_share(tmp_path, corpus, packing):
    data = prepare(tmp_path, source=corpus, eval_fraction=0.2, packing=packing)
    total = data.train.num_tokens + data.evaluation.num_tokens
    assert data.evaluation.num_tokens == round(0.2 * total)
    assert data.train.num_documents + data.evaluation.num_documents in (12, 13)
    for rows in (data.train, data.evaluation):
        assert sum(int((row.targets != IGNORE_INDEX).sum()) for row in rows) == rows.num_tokens - rows.num_documents


def test_rows_decode_to_the_documents(tmp_path, corpus):
    data = prepare(tmp_path, source=corpus, eval_fraction=0.2)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    first = text_of(data.train, tokenizer)
    assert "This is document 11. This is document 11." in first
    assert data.num_tokenizer_entries == len(tokenizer) <= 300 and data.pad_id == tokenizer.pad_token_id


def test_split_is_the_same_in_every_preparation(tmp_path, corpus):
    first, second = (prepare(tmp_path / name, source=corpus) for name in ("a", "b"))
    assert len(first.evaluation) == len(second.evaluation) > 0
    for one, other in zip(first.evaluation, second.evaluation, strict=True):
        assert np.array_equal(one.input_ids, other.input_ids)


def test_single_document_is_cut_in_two(tmp_path):
    (tmp_path / "one.txt").write_text(" ".join(map(str, range(500))))
    data = prepare(tmp_path, source=f"path:{tmp_path}/one.txt", eval_fraction=0.1)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    assert text_of(data.train, tokenizer).startswith("0 1 2")
    assert text_of(data.evaluation, tokenizer).endswith("498 499")
    assert data.train.num_documents == data.evaluation.num_documents == 1


def test_trained_tokenizer_has_not_seen_held_out_text(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("fluxray.data.text.train_tokenizer", lambda texts, size: train_tokenizer(seen_by(texts), size))

    def seen_by(texts):
        for text in texts:
            seen.append(text)
            yield text

    (tmp_path / "one.txt").write_text("a" * 500 + "b" * 500)
    prepare(tmp_path, source=f"path:{tmp_path}/one.txt", eval_fraction=0.5)
    assert seen == ["a" * 500]


def test_held_out_source_leaves_the_training_source_whole(tmp_path, corpus):
    (tmp_path / "held.md").write_text("This is held out. " * 10)
    data = prepare(tmp_path, source=corpus, eval_source=f"path:{tmp_path}/held.md")
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    assert data.train.num_documents == 12 and data.evaluation.num_documents == 1
    assert text_of(data.evaluation, tokenizer) == "This is held out. " * 10


def test_tokenizer_of_the_weights_is_the_default(tmp_path, corpus):
    train_tokenizer(["zebra " * 100], 270).save_pretrained(tmp_path / "weights")
    own = AutoTokenizer.from_pretrained(tmp_path / "weights")
    data = prepare(tmp_path, f"path:{tmp_path}/weights", source=corpus)
    assert AutoTokenizer.from_pretrained(data.tokenizer_dir).get_vocab() == own.get_vocab()
    trained = prepare(tmp_path, f"path:{tmp_path}/weights", source=corpus, tokenizer="train")
    assert AutoTokenizer.from_pretrained(trained.tokenizer_dir).get_vocab() != own.get_vocab()


def test_summary_is_one_line_of_counts(tmp_path, corpus):
    data = prepare(tmp_path, source=corpus)
    summary = data.summary()
    assert "\n" not in summary
    assert f"{data.train.num_tokens:,} tokens" in summary and f"{data.evaluation.num_tokens:,} tokens" in summary


def test_tokenizer_larger_than_the_model_is_refused(tmp_path, corpus):
    train_tokenizer(["zebra " * 100], 265).save_pretrained(tmp_path / "tok")
    fault = r"^model\.config\.vocab_size: 260 is smaller than the \d+ entries of the tokenizer path:.*raise it"
    with pytest.raises(ConfigError, match=fault):
        prepare(tmp_path, model_vocab=260, source=corpus, tokenizer=f"path:{tmp_path}/tok")
    assert not (tmp_path / "cache").exists()


def test_vocabulary_size_without_training_is_refused(tmp_path, corpus):
    train_tokenizer(["zebra"], 270).save_pretrained(tmp_path / "tok")
    with pytest.raises(ConfigError, match=r"^data\.vocab_size: 280 has no effect.*model\.weights.*data\.tokenizer=train"):
        prepare(tmp_path, f"path:{tmp_path}/tok", source=corpus, vocab_size=280)


def test_weights_without_a_tokenizer_are_named(tmp_path, corpus):
    (tmp_path / "weights").mkdir()
    with pytest.raises(DataError, match=r"^model\.weights: path:.*data\.tokenizer=train"):
        prepare(tmp_path, f"path:{tmp_path}/weights", source=corpus)


@pytest.mark.parametrize(
    ("text", "keys", "fault"),
    [
        (" \n ", {}, r"^data\.source: .*holds no text"),
        ("xy", {}, r"^data\.eval_fraction: 0\.05 of \d tokens leaves the held-out part"),
        ("xy", {"eval_fraction": 0.9}, r"^data\.eval_fraction: 0\.9 of \d tokens leaves the training part"),
        ("text", {"eval_source": "path:{dir}/blank.md"}, r"^data\.eval_source: .*holds no text"),
        ("text", {"eval_source": "path:{dir}/none.md"}, r"^data\.eval_source: .*does not exist"),
    ],
)
def test_empty_part_is_refused(tmp_path, text, keys, fault):
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "blank.md").write_text("\n\n")
    keys = {name: value.format(dir=tmp_path) if isinstance(value, str) else value for name, value in keys.items()}
    with pytest.raises(DataError, match=fault) as raised:
        prepare(tmp_path, source=f"path:{tmp_path}/a.txt", model_vocab=None, **keys)
    assert "\n" not in str(raised.value)
