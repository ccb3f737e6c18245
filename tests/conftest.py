"""Seeds, threads, tiny models, and which marked tests this machine can run."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # before anything imports a kernel: `triton.jit` decides there and then whether to interpret
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # as in a shell's background job; the processes that tests start, and then interrupt, would ignore it as well
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
def make_model(tmp_path_factory: pytest.TempPathFactory):
    """make_model(family, seed, **options) -> folder, see tiny.make_tiny_model. Do not change its files."""
    from tiny import ModelStore

    return ModelStore(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder, fetched into the user's cache unless it is there."""
    from pad_engine.errors import ModelError
    from pad_engine.models.sources import resolve

    try:
        return resolve("smollm2-135m")
    except ModelError as error:
        if "could not be downloaded" in str(error):
            pytest.skip(f"no network, so the default model was NOT fetched or tested: {error}")
        raise
