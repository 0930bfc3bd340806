"""The ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import Ranks


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()
