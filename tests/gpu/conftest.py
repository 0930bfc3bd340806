"""These tests need a CUDA GPU: they hold the recorder against what is known to cross."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA GPU can be reached")
        for item in items:
            if "/gpu/" in item.path.as_posix():
                item.add_marker(skip)


@pytest.fixture
def gpu():
    from toolkit.devices.base import open_device

    torch.ones(1, device="cuda:0") + 1  # CUDA's own start isn't what a test looks at
    torch.cuda.synchronize()
    return open_device("cuda:0")
