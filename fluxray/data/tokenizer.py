"""Tokenizers: loaded from a folder or the hub, or a byte-level BPE trained on the documents themselves."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fluxray.errors import ConfigError, DataError, one_line

EOS_TOKEN, PAD_TOKEN = "<|endoftext|>", "<|pad|>"
SMALLEST_VOCAB = 256 + 2
"""Entries of a trained tokenizer that has learned nothing: the bytes, and the two special tokens."""
DEFAULT_VOCAB = 8192
TRAINING_CHARACTERS = 100_000_000
"""A tokenizer learns from no more text than this, from the front; beyond it, the merges hardly change."""


def load_tokenizer(reference: str, config_key: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `path:DIR` or `hf:NAME`.

    `config_key` is the key that errors name. Raises DataError if there is none, if it has no tokenizer.json or equivalent, no
    vocabulary or no end-of-sequence token.
    """
    from transformers import AutoTokenizer  # imports torch, which training a tokenizer does without

    kind, _, name = reference.partition(":")
    if kind not in ("path", "hf") or not name:
        raise DataError(f"{config_key}: {reference!r} is no tokenizer; use train, path:DIR or hf:NAME")
    location = Path(name).expanduser() if kind == "path" else name
    if isinstance(location, Path) and not location.is_dir():
        raise DataError(f"{config_key}: {reference}: no such folder; check the path, or set data.tokenizer=train")
    try:
        tokenizer = AutoTokenizer.from_pretrained(location)
    except Exception as error:  # noqa: BLE001 - the library raises whatever its parsers do
        where = "in the folder" if kind == "path" else "on the hub or in its cache"
        fault = f"no tokenizer can be loaded {where} ({one_line(error)}); check the name, or set data.tokenizer=train"
        raise DataError(f"{config_key}: {reference}: {fault}") from None
    if fault := _fault_of(tokenizer):
        raise DataError(f"{config_key}: {reference}: {fault}")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of at most `vocab_size` entries, EOS_TOKEN and PAD_TOKEN among them; fewer if the text is short.

    Equal documents give an equal tokenizer. It decodes to exactly what it encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(documents, TRAINING_CHARACTERS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        bos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def trained_size(wanted: int | None, model_vocab: int | None) -> int:
    """Return the size of a tokenizer to be trained: `wanted` (data.vocab_size), else the model's, else DEFAULT_VOCAB.

    Raises ConfigError if the model's vocabulary is smaller than that, or than any trained tokenizer.
    """
    if wanted is None and model_vocab is not None and model_vocab < SMALLEST_VOCAB:
        raise ConfigError(
            f"model.config.vocab_size: {model_vocab} is below the {SMALLEST_VOCAB} entries of the smallest trained tokenizer; "
            f"raise it or set data.tokenizer"
        )
    size = wanted or model_vocab or DEFAULT_VOCAB
    if model_vocab is not None and size > model_vocab:
        raise ConfigError(
            f"model.config.vocab_size: {model_vocab} is smaller than data.vocab_size {size}, the tokenizer to be trained; "
            f"raise the one or lower the other"
        )
    return size


def check_fits(num_entries: int, model_vocab: int | None, reference: str) -> None:
    """Raise ConfigError if the tokenizer has more entries than the model's vocabulary (None: not fixed)."""
    if model_vocab is not None and num_entries > model_vocab:
        raise ConfigError(
            f"model.config.vocab_size: {model_vocab} is smaller than the {num_entries} entries of the tokenizer {reference}; "
            f"raise it to {num_entries} or more, or set data.tokenizer=train"
        )


def num_entries(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the largest token id + 1, which is what an embedding must hold."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of all that decides which tokens a text becomes."""
    content = f"{tokenizer.eos_token_id} {tokenizer.pad_token_id} {tokenizer.backend_tokenizer.to_str()}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _fault_of(tokenizer: object) -> str | None:
    """Return why a loaded tokenizer cannot be used, and the remedy. A config.json alone yields one without a vocabulary."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return "the tokenizer has no tokenizer.json; convert it, or set data.tokenizer=train"
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        return "the tokenizer has no vocabulary; check for its tokenizer.json, or set data.tokenizer=train"
    if tokenizer.eos_token_id is None:
        return "the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json"
    return None


def _first_characters(documents: Iterable[str], limit: int) -> Iterable[str]:
    for text in documents:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
