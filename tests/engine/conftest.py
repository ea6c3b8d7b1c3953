from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def process_group(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank's gloo group, and one thread."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
