import pytest
import yaml

from fluxray.config.text import dump, parse, parse_word


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-1.5", -1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("0", 0),
        ("-12", -12),
        ("007", "007"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("'3e-4'", "3e-4"),
        ("hf:Salesforce/wikitext:wikitext-103-raw-v1", "hf:Salesforce/wikitext:wikitext-103-raw-v1"),
        ("[a, 1, {b: true}]", ["a", 1, {"b": True}]),
    ],
)
def test_plain_words_mean_what_json_would_read(text, value):
    parsed = parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value", ["3e-4", "no", "on", "2026-01-31", "true", "null", "~", "", "1:30", "007", "a #b", "é", 1e-5, 1e22, 3]
)
def test_dumped_values_read_alike_in_both_dialects(value):
    assert parse(dump({"key": value})) == {"key": value}
    assert yaml.safe_load(dump({"key": value})) == {"key": value}


@pytest.mark.parametrize(
    ("word", "pair"),
    [
        ("data.source=*.txt", ("data.source", "*.txt")),
        ("data.source=&a [*a]", ("data.source", "&a [*a]")),
        ("data.source=path:a=b.txt", ("data.source", "path:a=b.txt")),
        ("name='x'", ("name", "x")),
        ("optim.lr= 3e-4", ("optim.lr", 3e-4)),
    ],
)
def test_words_are_split_at_the_first_equals_sign(word, pair):
    assert parse_word(word) == pair
