"""The manifest gate refuses incomplete manifests before it runs anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_jax.test import gate

ROOT = Path(__file__).resolve().parents[4]


def test_a_missing_path_and_an_unlisted_test_are_named(tmp_path):
    tests = tmp_path / "python/sgl_jax/test/a"
    tests.mkdir(parents=True)
    (tests / "test_one.py").write_text("")
    (tests / "test_two.py").write_text("")
    found = gate.problems(tmp_path, ["python/sgl_jax/test/a/test_one.py", "python/sgl_jax/test/gone"])
    assert found == [
        "manifest entry does not exist: python/sgl_jax/test/gone",
        "test file is covered by no manifest entry: python/sgl_jax/test/a/test_two.py",
    ]


def test_a_path_listed_twice_is_refused(tmp_path):
    manifest = tmp_path / "m.toml"
    manifest.write_text('version = 1\n[[group]]\nname = "g"\npaths = ["x", "x"]\n')
    with pytest.raises(ValueError, match="listed twice: x"):
        gate.manifest_paths(manifest)


def test_the_checked_in_gate_covers_the_tree():
    paths = gate.manifest_paths(ROOT / "test/manifests/cpu_gate.toml")
    assert gate.problems(ROOT, paths) == []
