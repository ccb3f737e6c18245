"""Seeds, threads, tiny models, and which marked tests this machine can run."""

import sys
from pathlib import Path

import pytest
import torch

# pytest runs in importlib mode, which finds no helper modules beside the tests by itself
sys.path.append(str(Path(__file__).parent))


def pytest_configure() -> None:
    # tiny models: a second thread costs more in waiting than it gives
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory):  # noqa: ANN201
    """make_model(family, seed, **options) -> folder, see tiny.make_tiny_model. Written once: do not change its files."""
    from tiny import ModelStore

    return ModelStore(tmp_path_factory.mktemp("models"))
