"""Adapters on both engines: what is trained, what is read alone, and what is saved."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray.config.adapter import LoraConfig
from fluxray.engine.clip import Clip, clip_units
from fluxray.engine.parallelize import Techniques, parallelize
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.errors import CheckpointError, ConfigError
from fluxray.models import lora
from fluxray.optim.build import build_by_unit
from tests.engine.helpers import EIGHT_BIT, expect_close_values, section
from tests.engine.lora_cases import CASES, LLAMA, LORA, Adapted, expect_resumed, frozen_of, materialised, saved
from tests.engine.stream_helpers import LateTransfers, expect_same, masters_of, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = {"techniques": Techniques("mixed-bf16")}
WIDE = {**MIXED, "optim": EIGHT_BIT, "clip": "previous"}


@pytest.mark.parametrize("family", CASES)
def test_an_adapted_model_begins_as_its_base_and_draws_the_same_values_anywhere(family: str) -> None:
    adapted = Adapted(family)
    first, again = (materialised(adapted.stack()) for _ in range(2))
    base = materialised(replace(adapted, adapter=None).stack())
    frozen = frozen_of(first.model)
    for name, parameter in base.model.named_parameters():
        assert torch.equal(frozen.pop(name), parameter), name
    assert not frozen and first.adapts and not base.adapts and first.base == {"seed": "3"}
    values, others = (dict(stack.model.named_parameters()) for stack in (first, again))
    trained = {name: p for name, p in values.items() if p.requires_grad}
    assert trained and all(torch.equal(p, others[name]) for name, p in trained.items())
    for name, parameter in trained.items():
        if ".lora_B." in name:
            assert not parameter.any()
        else:  # peft's: uniform within 1 / sqrt(inputs)
            bound = parameter.shape[1] ** -0.5
            assert 0.5 * bound < parameter.abs().max() <= bound
    batch = adapted.batches(1, 0)[0]
    outputs = [stack.eval()(batch, lambda output, _: output) for stack in (first, base)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", CASES)
def test_default_targets_are_the_projections_of_attention(family: str) -> None:
    model = Adapted(family).stack().model
    ends = {name.split(".lora_A.")[0] for name, p in model.named_parameters() if ".lora_A." in name}
    expected = {
        "llama": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "flux1": {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"},
        "flux2": {
            *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
            *("to_qkv_mlp_proj", "to_out"),
        },
    }
    assert {name.partition("attn.")[2] for name in ends} == expected[family]


def test_named_targets_replace_them_and_unknown_ones_are_refused() -> None:
    def adapted(*targets: str) -> set[str]:
        model = Adapted("flux1", LoraConfig(rank=2, targets=targets)).stack().model
        return {name.split(".lora_A.")[0] for name, p in model.named_parameters() if ".lora_A." in name}

    assert adapted("ff.net.2", "single_transformer_blocks.1.proj_out") == {
        "transformer_blocks.0.ff.net.2",
        "transformer_blocks.1.ff.net.2",
        "single_transformer_blocks.1.proj_out",
    }
    for wrong, meant in (("to_qq", "to_q"), ("net.3", "net.2"), ("x_embedder", "proj_mlp")):
        with pytest.raises(ConfigError) as refused:
            adapted(wrong)
        said = f"adapter.targets: {wrong!r} ends the name of no linear layer in the model's blocks; did you mean "
        assert str(refused.value).startswith(said)
        assert wrong == "x_embedder" or str(refused.value) == f"{said}{meant}?"


@pytest.mark.parametrize("family", CASES)
def test_both_engines_equal_a_plain_loop_over_pefts_layers(family: str) -> None:
    adapted = Adapted(family)
    losses, expected = adapted.plain()
    engines = (adapted.sharded(), adapted.streamed(), adapted.streamed(StreamSettings(2, 1, resident_blocks=1), clip="block"))
    for engine in engines:
        outputs = adapted.train(engine)
        assert [loss for loss, _ in outputs] == pytest.approx(losses, rel=1e-6)
        weights = section(engine, "weights")
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            expect_close_values(weights[name], value, 1e-4, name)


@pytest.mark.parametrize("differing", [{}, MIXED, WIDE], ids=["fp32", "mixed-bf16", "8-bit moments"])
@pytest.mark.parametrize("family", CASES)
def test_what_is_frozen_stays_bit_for_bit_and_engines_agree(family: str, differing: dict, tmp_path: Path) -> None:
    adapted = Adapted(family)
    sharded, streamed = adapted.sharded(**differing), adapted.streamed(**differing)
    dtype = torch.bfloat16 if differing else torch.float32
    for engine in (sharded, streamed):
        first = frozen_of(engine._stack.model) if engine is sharded else _frozen_on_host(streamed)
        outputs = adapted.train(engine)
        last = frozen_of(engine._stack.model) if engine is sharded else _frozen_on_host(streamed)
        assert first.keys() == last.keys() and all(torch.equal(value, first[name]) for name, value in last.items())
        assert {value.dtype for value in last.values()} == {dtype}
        assert len({loss for loss, _ in outputs}) == 3
    assert frozen_of(sharded._stack.model).keys() == _frozen_on_host(streamed).keys()
    first, second = (masters_of(state_of(engine)) for engine in (sharded, streamed))
    assert first.keys() == second.keys() and all(".lora_" in name for name in first)
    for name, value in first.items():
        expect_close_values(second[name], value, 5e-2 if differing else 1e-4, name)
    assert list(sharded.load_items(saved(streamed, tmp_path))) == []  # masters of 32 bits, whatever the others have
    assert all(torch.equal(value, second[name]) for name, value in masters_of(state_of(sharded)).items())


def _frozen_on_host(engine) -> dict[str, torch.Tensor]:
    engine.flush()
    return {
        (unit.prefix + name).replace(".base_layer.", "."): sections["weights"].clone()
        for unit in (*engine._units, engine._outside)
        for name, fmt, sections in unit.layout.sections(*unit.memory)
        if not fmt.trained
    }


def test_the_base_is_fetched_and_adapters_alone_are_written_back() -> None:
    written: list[int] = []

    class Counting(LateTransfers):
        def write(self, host, device, after):
            written.append(host.numel())
            return super().write(host, device, after)

    adapted = Adapted("flux1", LoraConfig(rank=2, targets=("transformer_blocks.1.attn.to_q", "add_k_proj")))
    engine = adapted.streamed(transfers=Counting(0.0, 0.0), clip="block")
    adapted.train(engine, 1)
    layouts = [unit.layout for unit in engine._units]
    sizes = [size for layout in layouts for size in (layout.trained_weight_bytes, layout.state_bytes)]
    assert sizes[4:] == [0] * 4 and all(sizes[:4])  # single blocks have no adapter
    assert sorted(written) == sorted(size for size in sizes if size)
    assert all(layout.trained_weight_bytes < 0.4 * layout.weight_bytes for layout in layouts)
    assert engine._outside.layout.state_bytes == 0


@pytest.mark.parametrize("streamed", [False, True], ids=["sharded", "streamed"])
@pytest.mark.parametrize("family", CASES)
def test_checkpoints_hold_adapters_alone_and_resume_to_the_bit(family: str, streamed: bool, tmp_path: Path) -> None:
    expect_resumed(Adapted(family), streamed, tmp_path)


def test_another_base_is_refused(tmp_path: Path) -> None:
    reader = saved(Adapted("llama").sharded(), tmp_path)
    for build in (Adapted("llama", seed=4).sharded, Adapted("llama", seed=4).streamed):
        with pytest.raises(CheckpointError) as refused:
            build().load_items(reader)
        assert str(refused.value) == (
            "model: the checkpoint's adapters are of random weights of seed 3, the model is of random weights of seed 4; set "
            "model.weights, seed and adapter.base as they were"
        )
    with pytest.raises(CheckpointError, match=r"is missing; it is of another model"):
        Adapted("llama", LORA.model_copy(update={"targets": ("q_proj", "up_proj")})).sharded().load_items(reader)
    with pytest.raises(CheckpointError, match=r"it is of another model"):
        replace(Adapted("llama"), adapter=None).sharded().load_items(reader)


@pytest.mark.parametrize("family", ["flux2", "llama"])
def test_dropout_of_adapters_is_the_same_in_both_engines_and_when_computed_again(family: str) -> None:
    adapted = Adapted(family, LORA.model_copy(update={"dropout": 0.3}))
    assert adapted.stack().has_dropout
    plain, again = adapted.sharded(), adapted.sharded(techniques=Techniques("fp32", activation_checkpoint="full"))
    expected = adapted.train(plain)
    assert adapted.train(again) == expected
    assert [loss for loss, _ in adapted.train(adapted.streamed())] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert adapted.train(Adapted(family).sharded()) != expected
    batch = adapted.batches(1, 0)[:1]
    assert plain.eval_steps(batch)[0].sum.equal(plain.eval_steps(batch)[0].sum)


def test_stepping_in_backward_equals_stepping_after_it() -> None:
    adapted, case = Adapted("llama"), replace(LLAMA, clip="block", max_norm=0.01)
    stack = adapted.stack()
    masters = parallelize(stack, case.techniques, case.device, None)
    optimizer = build_by_unit(masters.named, case.optim, clip_units(stack))
    clip, runtime = Clip("block", 0.01, case.device), Runtime(case.device, "fp32", None)
    inside = ShardedEngine(stack, adapted.loss_fn(), masters, optimizer, clip, runtime)
    after = adapted.sharded(clip="block", max_norm=0.01)
    assert adapted.train(inside, num_micro_batches=1) == adapted.train(after, num_micro_batches=1)
    expect_same(state_of(inside), state_of(after))


def test_names_of_adapted_layers_are_found_again() -> None:
    model = Adapted("llama").stack().model
    layers = {lora.layer_of(path) for path, _ in model.named_modules()} - {None}
    assert ("model.layers.0.self_attn.q_proj", "lora_A") in layers and len(layers) == 2 * 4 * 3
    assert lora.library_path("model.layers.0.self_attn.q_proj.base_layer") == "model.layers.0.self_attn.q_proj"
    assert lora.library_path("lm_head") == "lm_head" and lora.layer_of("lm_head") is None


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("differing", [{}, MIXED], ids=["fp32", "mixed-bf16"])
@pytest.mark.parametrize("family", ["flux2", "llama"])
def test_fsdp_shards_a_frozen_base_beside_adapters(family: str, differing: dict, tmp_path: Path) -> None:
    adapted = Adapted(family)
    sharded, resident = adapted.sharded(DeviceMesh("cpu", torch.arange(1)), **differing), adapted.sharded(**differing)
    expected = [loss for loss, _ in adapted.train(resident)]
    assert [loss for loss, _ in adapted.train(sharded)] == pytest.approx(expected, rel=1e-3 if differing else 1e-6)
    frozen = frozen_of(resident._stack.model)
    for name, value in frozen_of(sharded._stack.model).items():
        assert torch.equal(value.to_local(), frozen[name]) and value.dtype == frozen[name].dtype
    assert list(resident.load_items(saved(sharded, tmp_path))) == []
