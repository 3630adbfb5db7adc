"""Argument parsing that answers a slip with one line and a suggestion.

Knows no command. `Parser` differs from argparse in four ways: errors are raised as `UsageError` (nothing is printed and
nothing exits), unknown flags bring the nearest known one, flags may be written with underscores, and positional
arguments may stand before, between and after flags; everything after `--` is positional.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from foveal.errors import RequestError


class UsageError(RequestError):
    """The command line itself is wrong."""

    code = "usage"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `known`, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class Parser(argparse.ArgumentParser):
    """A command's parser. Its positional arguments have `nargs` or a fixed number, never REMAINDER."""

    def __init__(self, *, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_command(self, argv: Sequence[str]) -> argparse.Namespace:
        """Read `argv` into a namespace. Raises UsageError."""
        flags, literal = _split_at_dashes(argv)
        flags = [self._with_hyphens(word) for word in flags]
        unknown = self._first_unknown_flag(flags)
        if unknown is not None:
            hint = did_you_mean(unknown, self._option_string_actions)
            self.error(f"unknown flag {unknown}{hint}")
        marked = [_hide(word) for word in literal]
        namespace = self.parse_intermixed_args([*flags, *marked])
        for name, value in vars(namespace).items():
            setattr(namespace, name, _show(value))
        return namespace

    def _with_hyphens(self, word: str) -> str:
        name, equals, value = word.partition("=")
        hyphenated = name.replace("_", "-")
        is_flag = name.startswith("--") and hyphenated in self._option_string_actions
        return hyphenated + equals + value if is_flag else word

    def _first_unknown_flag(self, words: Sequence[str]) -> str | None:
        for word in words:
            name = word.partition("=")[0]
            is_text = (
                " " in name
            )  # a question that starts with dashes; argparse reads it as one too
            if name.startswith("--") and not is_text and name not in self._option_string_actions:
                return name
        return None


# What follows `--` goes through argparse behind a character that no flag starts with, because argparse versions differ
# in how they treat `--` between and after positional arguments.
_HIDDEN = "\x00"


def _split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _hide(word: str) -> str:
    return _HIDDEN + word


def _show(value: object) -> object:
    if isinstance(value, str):
        return value.removeprefix(_HIDDEN)
    if isinstance(value, list):
        return [_show(item) for item in value]
    return value
