"""What a run may not do: load code from data, leave its storage, show secrets."""

import ast
from pathlib import Path

import pytest
import yaml

import fluxray
from fluxray.config.load import resolve
from fluxray.config.text import _Loader
from fluxray.errors import ConfigError, FluxrayError
from fluxray.export import export_run
from fluxray.runtime.paths import REGISTRY_FILE, Home, committed_checkpoints, find_run, new_run_name, write_text
from fluxray.runtime.prepare import prepare

SOURCES = sorted(Path(fluxray.__file__).parent.rglob("*.py"))
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
HOSTILE = ["..", ".", "../other", "../../etc", "/etc", "a/b", "a/../../b", "~", "-rf", "a\nb", "a\0b", "", "..\\b", "x" * 201]
TRUSTED_PICKLE = {"board.py", "report.py"}
"""The driver's function on its way to its own workers, inside one Ray cluster; never a file."""


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_that_runs_code_is_loaded_from_a_file(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found = {name.rpartition(".")[2] for name in names} & UNPICKLERS
            assert not found or (path.name in TRUSTED_PICKLE and found <= {"pickle", "cloudpickle"})
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if dotted(node.func) in ("torch.load", "dcp.load"):
            assert isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True  # type: ignore[union-attr]
        for option in ("allow_pickle", "trust_remote_code"):
            assert option not in given or getattr(given[option], "value", True) is False
        if dotted(node.func).endswith("from_pretrained"):
            assert "use_safetensors" not in given or getattr(given["use_safetensors"], "value", False) is True
        assert dotted(node.func) not in ("eval", "exec", "os.system", "yaml.unsafe_load", "yaml.full_load")
        assert dotted(node.func) != "yaml.load" or (dotted(given["Loader"]) == "_Loader" and issubclass(_Loader, yaml.SafeLoader))
        assert not (dotted(node.func).startswith("subprocess.") and getattr(given.get("shell"), "value", False))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_run_cannot_be_named_out_of_the_storage_root(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: "):
        resolve("cpu", "lm-tiny", {"name": name})


@pytest.mark.parametrize("label", [f"path:{name}" for name in HOSTILE] + [f"hf:{name}" for name in HOSTILE])
def test_a_generated_name_stays_in_the_storage_root(tmp_path: Path, label: str) -> None:
    name = new_run_name(label, tmp_path)
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert resolve("cpu", "lm-tiny", {"name": name}).name == name


def test_a_symlink_in_the_place_of_a_run_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write_text(outside / "config.yaml", "")
    (tmp_path / "home" / "runs").mkdir(parents=True)
    (tmp_path / "home" / "runs" / "first").symlink_to(outside)
    config = resolve("cpu", "lm-tiny", {"name": "first", "storage": str(tmp_path / "home")})
    with pytest.raises(ConfigError, match=r"^name: 'first' is a link in .*; remove it or set another name"):
        prepare(config, "run")
    assert [path.name for path in outside.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("name", ["..", "../outside", "/etc", "."])
def test_a_name_outside_of_the_root_finds_no_run_there(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run yet"):
        find_run(name, Home(tmp_path / "home"))


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", ".", "", "a/b"])
def test_a_registry_cannot_name_a_checkpoint_outside_of_its_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / REGISTRY_FILE).write_text(f'{{"checkpoint_results": [{{"checkpoint_dir_name": "{name}"}}]}}')
    with pytest.raises(FluxrayError, match=REGISTRY_FILE):
        committed_checkpoints(tmp_path / "run")


def test_a_checkpoint_with_an_index_that_points_outside_is_damage(tmp_path: Path) -> None:
    from fluxray.checkpoint import CheckpointReader, write_json

    folder = tmp_path / "step_00000001"
    folder.mkdir()
    head = {"format": 1, "state": {}, "num_ranks": 1, "files": {"../secret": 1}}
    (tmp_path / "secret").write_text("x")
    write_json(folder / "checkpoint.json", head)
    with pytest.raises(FluxrayError, match="its index is damaged"):
        CheckpointReader(folder)


def test_nothing_is_exported_over_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_run(tmp_path / "run", tmp_path / "out")
