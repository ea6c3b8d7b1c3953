"""What the documents name exists: links, files, commands, keys, presets, make targets, and the order of imports."""

import itertools
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import typer

from fluxray.cli import app
from fluxray.config.keys import schema_fields
from fluxray.config.load import preset_names
from tests.readme import commands_without_needs

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FREE_KEYS = ("model.config.", "resources.label_selector.")

each_document = pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)


def shell_words(doc: Path) -> list[str]:
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", doc.read_text(), flags=re.DOTALL)
    return [word for block in blocks for line in block.splitlines() for word in re.sub(r"\s+#.*", "", line).split()]


def code_spans(doc: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", doc.read_text())


@each_document
def test_relative_links_lead_somewhere(doc):
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", doc.read_text())
    assert [link for link in links if not (doc.parent / link).exists()] == []


@each_document
def test_named_files_exist(doc):
    named = [
        span
        for span in [*code_spans(doc), *shell_words(doc)]
        if re.fullmatch(r"(fluxray|jobs|tests|docs|deploy|\.ci)/[\w./-]+", span)
    ]
    assert [path for path in named if not (ROOT / path).exists()] == []


@each_document
def test_named_commands_exist(doc):
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    words = [*shell_words(doc), *(word for span in code_spans(doc) for word in [*span.split(), ""])]
    named = {after for word, after in itertools.pairwise(words) if word == "fluxray" and re.fullmatch(r"[a-z]+", after)}
    assert named <= verbs


@each_document
def test_each_command_is_run_by_a_test_or_says_what_it_needs(doc):
    """`tests/runtime/test_readme.py` runs those of the README that begin with `fluxray`."""
    rest = [line for line in commands_without_needs(doc) if doc.name != "README.md" or not line.startswith("fluxray ")]
    assert rest == [], "add `# needs WHAT` to the line, or a test"


@each_document
def test_named_make_targets_exist(doc):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"`?\bmake ([a-z-]+)(?=[`\n ])", "\n".join([*code_spans(doc), *shell_words(doc)]))) <= set(targets)


@each_document
def test_named_presets_exist(doc):
    words = [*shell_words(doc), *(word for span in code_spans(doc) for word in span.split())]
    for option, folder in (("--profile", "profiles"), ("--model", "models")):
        named = {after for word, after in itertools.pairwise(words) if word == option}
        assert {name for name in named if name.islower() and not set(":.") & set(name)} <= set(preset_names(folder))


@each_document
def test_named_keys_exist(doc):
    words = [*shell_words(doc), *(word for span in code_spans(doc) for word in span.split())]
    keys = {match[1] for word in words if (match := re.match(r"([a-z]\w*(?:\.\w+)*)=", word))}
    sections = {key.partition(".")[0] for key in schema_fields()}
    ours = {key for key in keys if key.partition(".")[0] in sections and not key.startswith(FREE_KEYS)}
    assert ours <= set(schema_fields())


@each_document
def test_the_order_of_imports_is_the_enforced_one(doc):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    enforced = " > ".join(re.sub(r"\(\w+\) \| | \| \(\w+\)", "", layer) for layer in layers)
    for written in re.findall(r"^\s*cli > [^`]*?seeding$", doc.read_text(), flags=re.MULTILINE):
        assert " ".join(written.split()) == enforced


def test_the_benchmarks_are_generated_from_their_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as where it is run as a script
    render = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))["render"]
    for name in ("benchmarks.md", "reliability.md"):
        assert (ROOT / "docs" / name).read_text() == render(name)
