"""Seeds, threads, and which marked tests this machine can run."""

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
