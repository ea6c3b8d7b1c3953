"""Ray Train with NCCL: what only real cards can show."""

import sys
import time

import pytest
import torch

from fluxray.config.load import resolve

pytestmark = [
    pytest.mark.ray,
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA GPUs"),
]


@pytest.fixture(scope="module")
def cluster():
    """A Ray on this machine; the workers receive this file's functions by value."""
    import ray
    from ray import cloudpickle

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        ray.init(address="local", num_cpus=4, num_gpus=2, log_to_driver=False, logging_level="ERROR")
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            yield
        finally:
            ray.shutdown()


def one_rank_hangs(config, context):
    """Fall silent on rank 1 after three steps; rank 0's card waits for it, and rank 0 itself where ranks agree after a step."""
    import torch.distributed as dist

    from fluxray.runtime.worker import _host_ranks

    ranks = _host_ranks(config, context.num_ranks)
    device = torch.device("cuda", context.local_rank)
    for step in range(1, 9):
        if context.rank == 1 and step == 4:
            time.sleep(10_000)
        dist.all_reduce(torch.ones(1, device=device))
        ranks.any(context.heartbeat(step))
        time.sleep(1.1)
    raise AssertionError("unreachable")


@pytest.mark.usefixtures("cluster")
def test_a_rank_that_hangs_is_named_and_not_the_one_that_waited(tmp_path):
    from fluxray.runtime.launch import Steps, train
    from fluxray.runtime.outcome import FailedError

    asked = {"resources.num_workers": 2, "resources.gpu": 1, "resources.max_failures": 0, "resources.collective_timeout_s": 9}
    config = resolve("cpu", "lm-tiny", {"name": "hung", "storage": str(tmp_path), "batch.micro_size": 4, **asked})
    start = time.monotonic()
    with pytest.raises(FailedError, match=r"^run hung: worker 0 failed: .*[Tt]imed out.* \(worker 1 has said nothing since step"):
        train(config, steps=Steps(lambda *_: None, one_rank_hangs))
    assert 9 < time.monotonic() - start < 120
