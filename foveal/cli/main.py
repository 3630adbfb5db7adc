"""`foveal`: picks the command, runs it, and turns every error into one line and an exit code.

Exit codes: 0 done, 1 a check failed (`verify`, `fit`) or an unforeseen error, 2 the request is at fault, 3 the machine
cannot hold it, 4 the model or its files are at fault, 130 interrupted. FOVEAL_DEBUG=1 shows the traceback.

Importing this module imports no torch: `foveal --help` answers at once. Each command is a module of this
package with `add_arguments(parser)` and `run(arguments) -> exit code`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from foveal import __version__
from foveal.cli.parser import Parser, UsageError, did_you_mean
from foveal.errors import FovealError

EXIT_INTERRUPTED = 130
EXIT_UNFORESEEN = 1


@dataclass(frozen=True, slots=True)
class Command:
    """A command's name, usage, line in `foveal --help`, examples, and the module behind it."""

    name: str
    usage: str
    summary: str
    examples: str
    module: str


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "ask",
            'PICTURE... "QUESTION" [--boxes OUT.png] [--json] [flags]',
            "answer a question about pictures",
            'foveal ask photo.jpg "What is this?"\n'
            'foveal ask page.png "Locate the title." --boxes out.png\n'
            'foveal ask a.png b.png "What differs?" --json --model DIR',
            "foveal.cli.ask",
        ),
        Command(
            "fit",
            "MODEL [--image WIDTHxHEIGHT|FILE] [--json]",
            "say, before loading, what a model needs and whether it fits",
            "foveal fit DIR\nfoveal fit DIR --image 1920x1080 --json",
            "foveal.cli.fit",
        ),
        Command(
            "verify",
            "MODEL [--golden DIR] [--json]",
            "check a model against golden data, or against its own laws",
            "foveal verify DIR --golden GOLDEN\nfoveal verify demo-vl2",
            "foveal.cli.verify",
        ),
        Command(
            "env",
            "[--json]",
            "describe this machine and installation",
            "foveal env\nfoveal env --json",
            "foveal.cli.env",
        ),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except FovealError as error:
        return _fail(error, str(error), error.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`foveal ... | head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        text = f"unforeseen {type(error).__name__}: {error} (FOVEAL_DEBUG=1 shows where)"
        return _fail(error, text, EXIT_UNFORESEEN)
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"foveal {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        raise UsageError(_unknown(words[0]))
    module = importlib.import_module(command.module)
    parser = Parser(
        prog=f"foveal {command.name}",
        usage=f"foveal {command.name} {command.usage}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog="examples:\n" + _indented(command.examples),
    )
    module.add_arguments(parser)
    try:
        arguments = parser.parse_command(words[1:])
    except SystemExit as stop:  # argparse leaves this way after it has printed --help
        return int(stop.code or 0)
    return int(module.run(arguments))


def _unknown(word: str) -> str:
    kind = "flag" if word.startswith("-") else "command"
    known = ["--help", "--version"] if kind == "flag" else list(COMMANDS)
    hint = did_you_mean(word, known)
    return f"unknown {kind} {word!r}{hint or '; commands: ' + ', '.join(COMMANDS)}"


def _help() -> str:
    rows = "\n".join(f"  {c.name:<8}{c.summary}" for c in COMMANDS.values())
    examples = "\n".join(c.examples.splitlines()[0] for c in COMMANDS.values())
    return (
        "usage: foveal COMMAND ...\n\n"
        "Runs DeepSeek's open vision-language models.\n\n"
        f"commands:\n{rows}\n\n"
        f"examples:\n{_indented(examples)}\n\n"
        "foveal COMMAND --help says more; foveal --version prints the version."
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _fail(error: BaseException, text: str, code: int) -> int:
    if os.environ.get("FOVEAL_DEBUG"):
        raise error
    line = " ".join(text.split())
    print(f"foveal: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
