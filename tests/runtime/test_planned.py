import pytest

from fluxray.config.load import resolve
from fluxray.errors import ConfigError, PlanError
from fluxray.runtime import planned as module
from fluxray.runtime.figures import is_complete
from fluxray.runtime.planned import plan_worker, refuse_misfit

STREAM = ("engine.kind=stream", "activation_checkpoint=full", "hardware.tflops=0.1")
SMALL = ("model.config.hidden_size=64", "model.config.num_hidden_layers=3", "model.config.intermediate_size=128")


def test_hardware_is_complete_where_nothing_is_left_to_ask():
    assert is_complete(resolve("a6000", "neox-20b"))
    for key in ("device_memory", "host_memory", "link", "memory_bandwidth", "tflops"):
        assert not is_complete(resolve("a6000", "neox-20b", [f"hardware.{key}=null"]))
    assert not is_complete(resolve("cpu", "lm-tiny", STREAM))
    assert is_complete(resolve("cpu", "lm-tiny", [*STREAM, "hardware.host_memory=8GiB"]))


def test_the_driver_refuses_what_does_not_fit_complete_hardware():
    refuse_misfit(resolve("a6000", "lm-tiny"))
    refuse_misfit(resolve("a6000", "lm-tiny", ["hardware.device_memory=1GB", "hardware.link=null"]))  # a worker will ask
    with pytest.raises(PlanError) as refused:
        refuse_misfit(resolve("a6000", "lm-tiny", [*SMALL, "hardware.device_memory=760MB", "hardware.host_memory=8GiB"]))
    assert str(refused.value).startswith("plan: device memory lacks ") and "\n" not in str(refused.value)


def test_a_worker_tells_its_plan_in_two_lines(tmp_path):
    notices: list[str] = []
    words = [*STREAM, *SMALL, "engine.kept_blocks=1", "engine.resident_blocks=1", "hardware.host_memory=64GiB"]
    found = plan_worker(resolve("cpu", "lm-tiny", words), 4096, 0, notices.append, tmp_path)
    assert found is not None and found.policy.kept_blocks == 1 and found.policy.resident_blocks == 1
    assert len(notices) == 2 and notices[0].startswith("plan: device 0.")
    assert "1 of 3 blocks resident, activations of 1 kept, logits of 1,024 tokens at once" in notices[0]
    assert "bound by arithmetic 100%" in notices[1] and "floor" in notices[1]


def test_a_vocabulary_left_open_is_the_tokenizers(tmp_path):
    config = resolve("cpu", "lm-tiny", [*STREAM, *SMALL])
    open_ended = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"config": {k: v for k, v in config.model.config.items() if k != "vocab_size"}}
            )
        }
    )
    found = plan_worker(open_ended, 1000, 0, lambda _: None, tmp_path)
    assert found is not None and found.demand.spec.num_outputs == 1024


def test_a_worker_refuses_a_streamed_model_that_does_not_fit_and_plans_nothing_on_cpus(tmp_path):
    with pytest.raises(PlanError, match=r"^plan: device memory lacks "):
        plan_worker(resolve("cpu", "lm-tiny", [*STREAM, "hardware.host_memory=16MiB"]), 4096, 0, lambda _: None, tmp_path)
    assert plan_worker(resolve("cpu", "lm-tiny"), 4096, 0, lambda _: None, tmp_path) is None


def test_a_sharded_model_that_does_not_fit_is_told_and_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(module.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(module.torch.cuda, "reset_peak_memory_stats", lambda: None)
    words = [
        "hardware.device_memory=1GB",
        "hardware.memory_bandwidth=768GB/s",
        "hardware.tflops=100",
        "hardware.host_memory=64GiB",
    ]
    config = resolve("fsdp8", "lm-tiny", [*SMALL, *words, "batch.micro_size=64"])
    notices: list[str] = []
    assert plan_worker(config, 4096, 0, notices.append, tmp_path) is not None
    assert notices[0].startswith("plan: device memory lacks ") and notices[0].endswith("; trying it all the same")
    assert len(notices) == 3 and "resident" not in notices[1]
    assert plan_worker(config, 4096, 3, notices.append, tmp_path) is None, "rank 0 plans for all"


def test_a_model_without_a_block_list_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^model\.config\.model_type: 'gpt2' has no block list[^\n]*$"):
        refuse_misfit(resolve("a6000", None, ["model.config.model_type=gpt2"]))


def test_a_run_that_goes_on_keeps_what_was_decided_for_it(tmp_path):
    def decided(*words: str):
        config = resolve("cpu", "lm-tiny", [*STREAM, *SMALL, *words])
        found = plan_worker(config, 4096, 0, lambda _: None, tmp_path)
        assert found is not None
        return found.policy

    first = decided("hardware.host_memory=64GiB", "engine.kept_blocks=1", "loss.chunk_tokens=100")
    assert decided("hardware.host_memory=64GiB") == first
    assert decided("hardware.host_memory=64GiB", "loss.chunk_tokens=50").epilogue_tokens == 50
