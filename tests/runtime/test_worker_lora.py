"""Adapters from configuration to export, without Ray: plans, both engines, resume, evaluation."""

from pathlib import Path

import pytest
import torch

from fluxray import checkpoint
from fluxray.config.load import resolve, to_yaml
from fluxray.config.schema import TrainConfig
from fluxray.errors import FluxrayError
from fluxray.export import export_run
from fluxray.memory.plan import MemoryPlan
from fluxray.memory.spec import ModelSpec
from fluxray.protocols import Report
from fluxray.runtime.blockprobe import probe_blocks
from fluxray.runtime.planning import describe, model_spec, plan_run
from fluxray.runtime.worker import preflight, run_evaluation, run_worker
from tests.flow_caches import random_cache
from tests.runtime.test_flow_options import TINY
from tests.runtime.test_worker import context, deterministic_metrics, saved_tensors, small

pytestmark = pytest.mark.usefixtures("one_thread")

STREAM = ("engine.kind=stream", "activation_checkpoint=full", "hardware.host_memory=64GiB")
LORA = ("adapter.kind=lora", "adapter.rank=4")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    random_cache(folder, {(32, 32, 5): 8})
    return folder


def flow(cache: Path, *words: str) -> TrainConfig:
    return resolve("cpu", "flux1-tiny", [f"data.cache={cache}", *TINY, *LORA, *words])


def trained(config: TrainConfig, run_dir: Path, cache: Path) -> list[Report]:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    preflight(config, cache)
    reports: list[Report] = []
    run_worker(config, context(run_dir, cache, reports))
    return reports


def loss_of(reports: list[Report]) -> list[float]:
    return [report.metrics["train/loss"] for report in reports if "train/loss" in report.metrics]


@pytest.mark.parametrize("base", ["full", "nf4"])
def test_images_are_learned_by_adapters_on_both_engines_as_planned(base: str, cache: Path, tmp_path: Path) -> None:
    kept = f"adapter.base={base}"
    sharded = trained(flow(cache, kept), tmp_path / "sharded", cache)
    streamed = trained(flow(cache, kept, *STREAM, "train.log_every=1"), tmp_path / "streamed", cache)
    assert loss_of(streamed) == pytest.approx(loss_of(sharded), rel=1e-6)
    first, second = (saved_tensors(tmp_path / name) for name in ("sharded", "streamed"))
    assert {name for section, name in first if section == "weights"} == {n for section, n in second if section == "weights"}
    assert all(".lora_" in name for section, name in first if section != "base")
    (found,) = (report.metrics for report in streamed if "memory/planned_device_gib" in report.metrics)
    for exact in ("host_blocks_gib", "device_weights_gib", "device_optimizer_gib", "device_slots_gib", "device_gradients_gib"):
        assert found[f"memory/measured_{exact}"] == found[f"memory/planned_{exact}"], exact
    evaluated = run_evaluation(flow(cache, kept), context(tmp_path / "sharded", cache, []))
    assert evaluated.eval_loss == [r.metrics["eval/loss"] for r in sharded if "eval/loss" in r.metrics][-1]
    out = export_run(tmp_path / "streamed", tmp_path / "out", notify=lambda _: None)
    assert [path.name for path in out.iterdir()] == ["pytorch_lora_weights.safetensors"]


@pytest.mark.parametrize("words", [(), STREAM], ids=["sharded", "streamed"])
def test_text_is_learned_by_adapters_and_resumes_to_the_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    def config(num_steps: int) -> TrainConfig:
        plain = (*LORA, *words, "model.config.hidden_dropout=0", "checkpoint.every_steps=2", "optim.schedule=constant")
        return small(*plain, "optim.min_lr_ratio=0", f"train.num_steps={num_steps}", "adapter.dropout=0.1")

    whole = trained(config(4), tmp_path / "whole", tmp_path)
    parts = trained(config(2), tmp_path / "parts", tmp_path)
    rest = trained(config(4), tmp_path / "parts", tmp_path)
    kept = [pair for pair in deterministic_metrics(parts) if "eval/loss" not in pair[1]]
    assert kept + deterministic_metrics(rest) == deterministic_metrics(whole)
    actual, expected = saved_tensors(tmp_path / "parts"), saved_tensors(tmp_path / "whole")
    assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)
    size = sum(path.stat().st_size for path in checkpoint.committed(tmp_path / "whole")[0].glob("*.safetensors"))
    assert size < 40_000
    out = export_run(tmp_path / "whole", tmp_path / "out", notify=lambda _: None)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}


@pytest.fixture(scope="module")
def lora_spec() -> ModelSpec:
    return model_spec(resolve("a6000", "flux1-dev", ["adapter.kind=lora"]))


def test_plans_count_states_gradients_and_checkpoints_of_adapters_alone(lora_spec: ModelSpec) -> None:
    specs = {"none": None, "lora": lora_spec}
    whole, lora = (plan_run(resolve("a6000", "flux1-dev", [f"adapter.kind={kind}"]), spec) for kind, spec in specs.items())
    assert lora.demand.spec.num_trained == 26_148_864 and whole.demand.spec.num_trained == whole.demand.spec.num_parameters
    assert lora.bytes.host["blocks"] < 0.41 * whole.bytes.host["blocks"]  # 2 bytes a parameter in place of 5
    assert lora.disk_bytes < whole.disk_bytes / 200
    assert 2.1 < lora.demand.spec.step_flops / lora.demand.spec.forward_flops < 2.3  # attention has no weights to save for
    assert whole.demand.spec.step_flops == 3 * whole.demand.spec.forward_flops
    assert lora.speed.floor < 0.8 * whole.speed.floor
    one = resolve("fsdp8", "flux1-dev", ["resources.num_workers=1"])
    assert one.trained_optim is one.optim
    told = "\n".join(describe(resolve("a6000", "flux1-dev", ["adapter.kind=lora"]), lora, "flux1-dev"))
    assert "adapter           lora of rank 16: 26,148,864 parameters (0.22%) are trained: they alone have gradients" in told
    assert "master fp32" in told


def test_plans_count_4_bits_of_the_base(lora_spec: ModelSpec) -> None:
    def configured(profile: str, base: str) -> TrainConfig:
        figures = ("hardware.device_memory=80GB", "hardware.memory_bandwidth=2TB/s", "hardware.tflops=300")
        return resolve(profile, "flux1-dev", ["adapter.kind=lora", f"adapter.base={base}", *figures])

    specs = {"full": lora_spec, "nf4": model_spec(configured("a6000", "nf4"))}

    def planned(profile: str) -> list[MemoryPlan]:
        return [plan_run(configured(profile, base), spec) for base, spec in specs.items()]

    full, nf4 = planned("a6000")
    assert nf4.demand.spec.num_parameters == full.demand.spec.num_parameters
    assert nf4.demand.spec.step_flops == full.demand.spec.step_flops
    assert nf4.bytes.host["blocks"] < 0.32 * full.bytes.host["blocks"]  # 4.5 bits in place of 16, and the adapters
    assert nf4.disk_bytes == full.disk_bytes
    full, nf4 = planned("fsdp8")
    for what in ("weights", "gathered blocks"):
        assert nf4.bytes.device[what] < 0.35 * full.bytes.device[what], what
    told = "\n".join(describe(configured("fsdp8", "nf4"), nf4, "flux1-dev"))
    assert "base              nf4: linear layers of the blocks take 6.66 GB in 4 bits" in told


def test_blocks_of_adapters_are_measured(cache: Path) -> None:
    config = flow(cache, *STREAM, "adapter.base=nf4")
    attained, spec = probe_blocks(config, model_spec(config), torch.device("cpu"), None)
    assert attained > 0 and len(spec.blocks) > 0


def test_what_does_not_go_with_adapters_is_said_in_a_line(cache: Path) -> None:
    def refusal(*words: str) -> str:
        with pytest.raises(FluxrayError) as refused:
            preflight(flow(cache, *words), cache)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert refusal("adapter.targets=[to_qq]") == (
        "adapter.targets: 'to_qq' ends the name of no linear layer in the model's blocks; did you mean to_q?"
    )
    assert refusal("adapter.targets=[]") == "adapter.targets: [] names no layer; name some, such as to_q, or drop the key"
    assert refusal("model.fused_qkv=true") == (
        "model.fused_qkv: true makes one projection of three, and adapter.kind lora adapts each by itself; set "
        "model.fused_qkv=false"
    )
    with pytest.raises(FluxrayError) as refused:
        resolve("cpu", "flux1-tiny", ["adapter.rank=4"])
    assert str(refused.value) == "adapter.rank: has no effect with adapter.kind none; drop it or set adapter.kind=lora"
