from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

from fluxray.models import names
from fluxray.models.causal_lm import build_causal_lm
from fluxray.models.names import names_in_memory, names_on_disk
from tests.models.helpers import CASES, build, model_config

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


def meta(case: str) -> Any:
    return build_causal_lm(model_config(case), seed=0).model


def with_rules(monkeypatch: pytest.MonkeyPatch, *rules: Any) -> None:
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [*rules])


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_that_the_library_stores_and_come_back(case: str, tmp_path: Path) -> None:
    build(case).model.save_pretrained(tmp_path)
    model = meta(case)
    parameters = dict(model.named_parameters())
    found = names_on_disk(model)
    assert found is not None and found.keys() == parameters.keys()
    assert set(found.values()) == set(load_file(tmp_path / "model.safetensors"))
    assert names_in_memory(model, found.values(), parameters) == found


def test_only_the_head_of_neox_has_another_name() -> None:
    found = names_on_disk(meta("gpt_neox"))
    assert found is not None
    assert {name: key for name, key in found.items() if name != key} == {"lm_head.weight": "embed_out.weight"}


def test_files_in_the_names_of_memory_are_understood() -> None:
    model = meta("gpt_neox")
    known = dict(model.named_parameters())
    assert names_in_memory(model, known, known) == {name: name for name in known}


def test_unknown_keys_are_left_out() -> None:
    model = meta("llama")
    known = dict(model.named_parameters())
    assert names_in_memory(model, [GATE, "model.layers.0.self_attn.rotary_emb.inv_freq", "spare"], known) == {GATE: GATE}


def test_a_tensor_to_convert_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta("llama")
    known = dict(model.named_parameters())
    with_rules(monkeypatch, WeightConverter(["gate_proj.weight", "up_proj.weight"], "gate_proj.weight", [Concatenate(dim=0)]))
    assert names_in_memory(model, [GATE, UP], known) is None
    assert names_in_memory(model, ["model.norm.weight"], known) == {"model.norm.weight": "model.norm.weight"}
    assert names_on_disk(model) is None


def test_two_keys_of_one_name_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta("llama")
    with_rules(monkeypatch, WeightRenaming("up_proj", "gate_proj"))
    assert names_in_memory(model, [GATE, UP], {GATE: torch.ones(())}) is None


def test_rules_of_another_form_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta("llama")
    known = dict(model.named_parameters())
    with monkeypatch.context() as context:
        context.setattr(names, "RENAME_PARAMETERS", {"key"})
        assert names_in_memory(model, known, known) is None and names_on_disk(model) is None
    with_rules(monkeypatch, object())
    assert names_in_memory(model, known, known) is None
    monkeypatch.delattr(conversion_mapping, "get_model_conversion_mapping")
    assert names_in_memory(model, known, known) is None
