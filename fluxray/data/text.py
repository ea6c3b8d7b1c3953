"""From the data section of a configuration to training and held-out rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from fluxray.config.schema import DataConfig
from fluxray.data.rows import TextRows, training_lengths
from fluxray.data.sources import Source, open_sources, read_documents
from fluxray.data.store import TokenStore, ensure_store
from fluxray.data.tokenizer import check_fits, load_tokenizer, num_entries, tokenizer_fingerprint, train_tokenizer, trained_size
from fluxray.errors import ConfigError, DataError


@dataclass(frozen=True)
class TextData:
    """What a run learns from and is judged by.

    `tokenizer_dir` is to be copied beside the run, `num_tokenizer_entries` is the largest token id + 1, `pad_id` fills padding.
    """

    train: TextRows
    evaluation: TextRows
    tokenizer_dir: Path
    num_tokenizer_entries: int
    pad_id: int

    def summary(self) -> str:
        """Return one line for the log."""
        parts = ", ".join(
            f"{name} {_count(rows.num_documents, 'document')}, {_count(rows.num_tokens, 'token')}, {_count(len(rows), 'row')}"
            for name, rows in (("training", self.train), ("held out", self.evaluation))
        )
        return f"{parts}; tokenizer of {self.num_tokenizer_entries:,} entries"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def prepare_text(config: DataConfig, cache: Path, default_tokenizer: str | None, vocab_size: int | None) -> TextData:
    """Tokenise the sources, once per content under `cache`, and return their rows.

    `default_tokenizer` (the model's weights, `path:DIR` or `hf:NAME`) is used if `data.tokenizer` is not set; without it, one is
    trained on the training part. `vocab_size` is the model's, None if it is not fixed. Any number of processes may call this at
    once. The split does not depend on the run. Raises DataError for sources, tokenizers and splits that cannot be used and
    ConfigError for a tokenizer that does not fit the model's vocabulary.
    """
    sources = open_sources(config.source, config.text_key, "data.source")
    identity, build_tokenizer = _tokenizer_of(config, sources, default_tokenizer, vocab_size)
    store = ensure_store(cache, sources, identity, build_tokenizer)
    train, evaluation = _parts(config, cache, store)
    _refuse_empty(config, store, train, evaluation)
    return TextData(train, evaluation, store.tokenizer_dir, store.num_entries, store.pad_id)


def _tokenizer_of(
    config: DataConfig, sources: Sequence[Source], default: str | None, vocab_size: int | None
) -> tuple[str, Callable[[], PreTrainedTokenizerFast]]:
    """Return the identity of the tokenizer, known without training it, and how to get it."""
    reference = config.tokenizer or default or "train"
    config_key = "data.tokenizer" if config.tokenizer else "model.weights"
    if reference == "train":
        size = trained_size(config.vocab_size, vocab_size)
        share = 0.0 if config.eval_source is not None else config.eval_fraction
        return f"train {size} {share}", lambda: train_tokenizer(_training_texts(sources, share), size)
    if config.vocab_size is not None:
        raise ConfigError(
            f"data.vocab_size: {config.vocab_size} has no effect, the tokenizer {reference} of {config_key} is not trained; "
            f"drop it or set data.tokenizer=train"
        )
    tokenizer = load_tokenizer(reference, config_key)
    check_fits(num_entries(tokenizer), vocab_size, reference)
    return tokenizer_fingerprint(tokenizer), lambda: tokenizer


def _training_texts(sources: Sequence[Source], held_out_share: float) -> Iterator[str]:
    """Yield the training part as it stands before there are tokens: split by characters, so only near the cut it may differ."""
    lengths = np.fromiter(map(len, read_documents(sources)), np.int64)
    for text, length in zip(read_documents(sources), training_lengths(lengths, held_out_share), strict=True):
        yield text[:length]


def _parts(config: DataConfig, cache: Path, store: TokenStore) -> tuple[TextRows, TextRows]:
    """Return training and held-out rows: of two sources, or of one that is split."""

    def rows(of: TokenStore, begins: np.ndarray, lengths: np.ndarray) -> TextRows:
        return TextRows(of, begins, lengths, config.max_slice, config.packing)

    begins, lengths = store.offsets[:-1], np.diff(store.offsets)
    if config.eval_source is None:
        training = training_lengths(lengths, config.eval_fraction)
        return rows(store, begins, training), rows(store, begins + training, lengths - training)
    tokenizer = load_tokenizer(f"path:{store.tokenizer_dir}", "data.tokenizer")
    sources = open_sources(config.eval_source, config.text_key, "data.eval_source")
    held_out = ensure_store(cache, sources, tokenizer_fingerprint(tokenizer), lambda: tokenizer)
    return rows(store, begins, lengths), rows(held_out, held_out.offsets[:-1], np.diff(held_out.offsets))


def _refuse_empty(config: DataConfig, store: TokenStore, train: TextRows, evaluation: TextRows) -> None:
    if store.num_documents == 0:
        raise DataError(f"data.source: {config.source!r} holds no text; name a source that does")
    if evaluation.num_targets == 0 and config.eval_source is not None:
        raise DataError(f"data.eval_source: {config.eval_source!r} holds no text; name a source that does")
    for name, rows, remedy in (("held-out", evaluation, "raise it"), ("training", train, "lower it")):
        if rows.num_targets == 0:
            raise DataError(
                f"data.eval_fraction: {config.eval_fraction} of {store.num_tokens} tokens leaves the {name} part without a token "
                f"to predict; {remedy} or use more text"
            )
