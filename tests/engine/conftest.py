from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="module")
def process_group(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank's gloo group, and one thread."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """The first GPU as a group of one rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield DeviceMesh("cuda", torch.arange(1))
    dist.destroy_process_group()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Deterministic kernels alone; on a GPU their products want CUBLAS_WORKSPACE_CONFIG before CUDA starts."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
