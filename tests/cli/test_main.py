"""What holds for every command: exit codes, one-line errors, no traceback."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import foveal
from foveal import CheckpointError, FovealError, MediaError, ResourceError
from foveal.cli import main as cli
from foveal.cli.main import main


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"foveal {foveal.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: foveal COMMAND")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["akk"], "unknown command 'akk'; did you mean 'ask'?"),
        (["serve"], "unknown command 'serve'"),
        (["qqqq"], "unknown command 'qqqq'; commands: ask, fit, verify, env"),
        (["--verison"], "unknown flag '--verison'; did you mean '--version'?"),
        (["env", "--jsn"], "unknown flag --jsn; did you mean '--json'?"),
        (["env", "extra"], "unrecognized arguments: extra"),
        (["fit"], "the following arguments are required: MODEL"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("foveal: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    module = ModuleType("raising")

    def run(arguments: object) -> int:
        raise error

    module.__dict__.update(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)
    return main(["env"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MediaError("m"), 2),
        (ResourceError("m"), 3),
        (CheckpointError("m"), 4),
        (FovealError("m"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("m"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_raising(error, monkeypatch) == code
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_many_lines_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_raising(CheckpointError("missing:\n  a\n  b"), monkeypatch)
    assert capsys.readouterr().err == "foveal: error: missing: a b\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEAL_DEBUG", "1")
    with pytest.raises(CheckpointError):
        run_raising(CheckpointError("m"), monkeypatch)


def test_a_reader_that_leaves_early_causes_no_complaint() -> None:
    # `foveal --help | true`: the pipe is closed before anything is written.
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); "
        "from foveal.cli.main import main; sys.exit(main(['--help']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.returncode == 0
