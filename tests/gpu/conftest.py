"""These tests need a CUDA GPU: they hold the recorder against what is known to cross."""

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]  # tests/conftest.py says that they were not run
if torch.cuda.device_count() == 1:
    collect_ignore_glob.append("test_ranks.py")


@pytest.fixture(scope="session")
def gpu():
    from toolkit.gpu.opening import open_device

    torch.ones(1, device="cuda:0") + 1  # CUDA's own start isn't what a test looks at
    torch.cuda.synchronize()
    return open_device("cuda:0")
