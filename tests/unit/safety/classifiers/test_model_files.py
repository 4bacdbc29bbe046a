"""The shipped files are checked before they are used."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.safety.classifiers.model_files import MANIFEST, ModelDamaged, verify
from app.settings import SettingsError
from scripts.training.safety import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files with its manifest."""
    (tmp_path / "a.npz").write_bytes(b"weights")
    (tmp_path / "b.json").write_bytes(b"{}")
    manifest.write(tmp_path)
    return tmp_path


def test_files_as_shipped_pass(folder: Path):
    """Nothing is raised."""
    verify(folder, ["a.npz", "b.json"])


def test_a_changed_byte_is_found(folder: Path):
    """By the file's sha256, whatever its size."""
    (folder / "a.npz").write_bytes(b"weightz")
    with pytest.raises(ModelDamaged, match=r"a\.npz: not the file that was shipped"):
        verify(folder, ["a.npz"])


def test_a_missing_file_is_found(folder: Path):
    """Listed but not there."""
    (folder / "b.json").unlink()
    with pytest.raises(ModelDamaged, match="cannot be read"):
        verify(folder, ["b.json"])


def test_an_unlisted_file_is_refused(folder: Path):
    """There but not in the manifest."""
    (folder / "c.npz").write_bytes(b"x")
    with pytest.raises(ModelDamaged, match="cannot be read"):
        verify(folder, ["c.npz"])


@pytest.mark.parametrize("text", ["", "[]", '{"files": 1}', '{"files": {"a.npz": {}}}'])
def test_a_manifest_that_is_none_is_refused(folder: Path, text: str):
    """Damage to the list is damage to the model."""
    (folder / MANIFEST).write_text(text)
    with pytest.raises(ModelDamaged):
        verify(folder, ["a.npz"])


def test_the_server_refuses_to_start():
    """It is an error of settings, which the command reports in one line."""
    assert issubclass(ModelDamaged, SettingsError)
