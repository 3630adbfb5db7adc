"""`foveal env` says what a bug report needs, and no secret."""

from __future__ import annotations

import json

import pytest

import foveal
from foveal.cli.main import main


def test_env_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["foveal"] == foveal.__version__
    assert facts["dependencies"]["torch"]
    assert facts["cpu"]["torch_threads"] >= 1
    assert facts["devices"][0]["device"] == "cpu"
    assert isinstance(facts["models"], list)
    assert facts["memory"]["available"] is None or facts["memory"]["available"] > 0


def test_env_as_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for name in ("foveal", "python", "torch", "cpu flags", "memory", "models", "hub cache"):
        assert f"\n{name} " in "\n" + text


def test_env_shows_no_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    assert "OMP_NUM_THREADS" in text
