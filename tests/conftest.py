import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fluxray.data.latent_facts import Family


def pytest_xdist_auto_num_workers() -> int:
    """A process for each core; one where there is a GPU, whose memory tests count as a whole."""
    return 0 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)), 8)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread: these models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def flux1_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with real pictures as FLUX.1's latents and texts in `cache`, and the encoders in `pipeline`."""
    return _encoded(tmp_path_factory, "flux1")


@pytest.fixture(scope="session")
def flux2_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for FLUX.2, as klein reads it."""
    return _encoded(tmp_path_factory, "flux2")


def _encoded(factory: pytest.TempPathFactory, family: Family) -> Path:
    from tests.flow_pictures import write_pictures

    folder = factory.mktemp(f"{family}-pictures")
    write_pictures(folder, family)
    return folder
