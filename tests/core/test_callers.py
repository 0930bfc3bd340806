"""Whose code a line is: the user's own, or an installed package's."""

import pytest

from toolkit.core import callers


@pytest.fixture
def fresh():
    callers._installed_prefixes.cache_clear()
    yield
    callers._installed_prefixes.cache_clear()


def test_packages_in_a_folder_of_their_own_are_not_the_users_code(tmp_path, monkeypatch, fresh):
    """`pip install --target` puts packages into any folder, with the metadata that pip writes."""
    packages, project = tmp_path / "packages", tmp_path / "project"
    (packages / "some-1.0.dist-info").mkdir(parents=True)
    for folder in (packages, project):
        monkeypatch.syspath_prepend(folder)
    assert callers.is_installed(str(packages / "some" / "module.py"))
    assert not callers.is_installed(str(project / "train.py"))


@pytest.mark.parametrize("line", ["\N{SUPERSCRIPT TWO}", "9" * 5000, "-1", ""])
def test_a_place_without_a_line_has_no_source(line):
    assert callers.source_line(f"{__file__}:{line}") is None
