import pytest


@pytest.fixture(scope="module", autouse=True)
def small_tensors(one_thread: None) -> None:
    """A second thread costs more than it does."""
