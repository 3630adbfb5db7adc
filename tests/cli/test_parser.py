"""The command line's grammar."""

from __future__ import annotations

import pytest

from foveal.cli.parser import Parser, UsageError


def make() -> Parser:
    parser = Parser(prog="foveal ask", usage="foveal ask", description="Ask.", epilog="examples:")
    parser.add_argument("inputs", nargs="*")
    parser.add_argument("--boxes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--max-tokens", type=int)
    return parser


@pytest.mark.parametrize(
    ("argv", "inputs"),
    [
        (["a.png", "what?"], ["a.png", "what?"]),
        (["a.png", "--boxes", "o.png", "what?"], ["a.png", "what?"]),
        (["--json", "a.png", "b.png", "what?"], ["a.png", "b.png", "what?"]),
        (["a.png", "--boxes", "o", "b.png", "--json", "what?"], ["a.png", "b.png", "what?"]),
        (["a.png", "--", "-x", "--json"], ["a.png", "-x", "--json"]),
        (["--", "--boxes"], ["--boxes"]),
        (["a.png", "--what is -- it"], ["a.png", "--what is -- it"]),
        ([], []),
    ],
)
def test_positionals_may_stand_anywhere(argv: list[str], inputs: list[str]) -> None:
    assert make().parse_command(argv).inputs == inputs


def test_flags_after_two_dashes_are_text() -> None:
    assert make().parse_command(["--", "--json"]).json is False


@pytest.mark.parametrize("flag", ["--max-tokens=3", "--max_tokens=3"])
def test_hyphen_and_underscore_are_the_same(flag: str) -> None:
    assert make().parse_command(["q", flag]).max_tokens == 3


def test_underscores_in_values_stay() -> None:
    assert make().parse_command(["my_file.png", "--boxes=out_1.png"]).boxes == "out_1.png"
    assert make().parse_command(["my_file.png"]).inputs == ["my_file.png"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--jsn"], "unknown flag --jsn; did you mean '--json'"),
        (["--boxs=o.png"], "unknown flag --boxs; did you mean '--boxes'"),
        (["--zzz"], "unknown flag --zzz; see foveal ask --help"),
        (["--max-tokens", "many"], "invalid int value: 'many'"),
        (["--boxes"], "expected one argument"),
    ],
)
def test_a_slip_is_one_line_with_the_next_step(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make().parse_command(argv)
    assert message in str(caught.value)
    assert "--help" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match="unknown flag --max"):
        make().parse_command(["q", "--max", "3"])
