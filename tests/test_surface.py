"""What Foveal shows to the outside, and that what it says about itself is true."""

from __future__ import annotations

import importlib
import os
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import foveal
from foveal.cli.main import COMMANDS, main

PUBLIC = {
    "LLM",
    "ChatOptions",
    "ToolCall",
    "SamplingParams",
    "RequestOutput",
    "Delta",
    "Usage",
    "Message",
    "Picture",
    "Box",
    "Grounding",
    "MalformedBox",
    "__version__",
    "FovealError",
    "RequestError",
    "PromptError",
    "PromptTooLongError",
    "MediaError",
    "ModelNotFoundError",
    "ResourceError",
    "EngineError",
    "CheckpointError",
}


def test_public_names_are_a_decision() -> None:
    assert set(foveal.__all__) == PUBLIC


def test_all_is_complete() -> None:
    for name in foveal.__all__:
        assert getattr(foveal, name) is not None
    shown = {
        name
        for name, value in vars(foveal).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "").startswith("foveal")
    }
    assert shown <= set(foveal.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = foveal.nothing


def test_the_version_is_said_once(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert foveal.__version__ == project["version"]
    assert f"## [{foveal.__version__}]" in (repository / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["foveal.text", "foveal.vision", "foveal.verify", "foveal.ops"])
def test_all_of_packages_matches(package: str) -> None:
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"{package}.__all__ names {name!r}, which is not there"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS.values():
        assert f"  {command.name} " in text
        assert command.summary in text


FLAGS = {
    "ask": "--model --locate --boxes --json --stop --loop-guard-repeats --max-tokens "
    "--temperature --top-p --top-k --min-p --seed --repetition-penalty --dtype --device --vision-mode --picture-mode",
    "fit": "--image --context --device --json",
    "verify": "--golden --json --dtype --device",
    "env": "--json",
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: foveal {name} ")
    assert "examples:\n" in text
    for flag in FLAGS[name].split():
        assert flag in text


def test_typed_marker_and_entry_point(repository: Path) -> None:
    assert (repository / "foveal" / "py.typed").is_file()
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"foveal": "foveal.cli.main:main"}


def test_ci_runs_the_readme_test_command(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line.strip()]
    assert lines[-1] == "make test"
    assert "make test" in (repository / "README.md").read_text(encoding="utf-8")
