"""`foveal verify MODEL`: against golden data where there is some, against the model's own laws otherwise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from foveal.cli.loading import load_llm
from foveal.cli.output import note, table, write_json
from foveal.cli.parser import Parser, UsageError
from foveal.errors import EngineError

if TYPE_CHECKING:
    from foveal.llm import LLM
    from foveal.verify import CaseResult, Report

GOLDEN_DTYPE = "float32"
# Facts of a loaded model that say nothing about what was verified.
HIDDEN_FACTS = ("dtype_reason", "load_s", "max_model_len")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, hub id or shipped model")
    parser.add_argument(
        "--golden",
        metavar="DIR",
        help="folder with cases/: compare with them, in float32 and with the vendor's picture decoding; a folder with "
        "cases.json: compare the chat encoding of MODEL's encoding/ folder, no weights needed",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default=GOLDEN_DTYPE,
        help="for the laws; golden data is always compared in float32 (default: float32)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.golden is not None:
        report, facts = _against_golden(arguments)
    else:
        report, facts = _against_laws(arguments)
    if arguments.json:
        write_json({**facts, **report.as_json()})
    else:
        _print(report, facts)
    return 0 if report.is_passed else 1


def _against_golden(arguments: argparse.Namespace) -> tuple[Report, dict[str, object]]:
    from foveal.verify import CaseResult, Report, verify_encoding
    from foveal.verify.cases import list_cases

    if arguments.dtype != GOLDEN_DTYPE:
        raise UsageError(f"--dtype {arguments.dtype} is for verify without --golden; leave it out")
    folder = Path(arguments.golden)
    facts: dict[str, object] = {"golden": str(folder)}
    if (folder / "cases.json").is_file():
        return verify_encoding(Path(arguments.model), folder / "cases.json"), facts
    if not (folder / "cases").is_dir():
        note(f"{folder} has no cases/ folder; give the folder that holds cases/ (and checkpoint/)")
        return Report(()), facts
    paths = list_cases(folder)
    if not paths:
        note(f"{folder / 'cases'} holds no case (*.json with its *.safetensors)")
        return Report(()), facts
    try:
        return _compare(arguments, folder)
    except EngineError as error:
        # A checkpoint that cannot be loaded passes no case.
        return Report(tuple(CaseResult(path.stem, error=str(error)) for path in paths)), facts


def _compare(arguments: argparse.Namespace, folder: Path) -> tuple[Report, dict[str, object]]:
    """Load the model as its family wants and run the cases."""
    from foveal.verify import V4Subject, verify_golden, verify_v4_golden

    facts: dict[str, object] = {"golden": str(folder)}
    model, family = _find(arguments.model)
    if family == "deepseek_v4":
        subject = V4Subject(model, device=arguments.device)
        facts |= {"model": model.name, "family": family, "dtype": GOLDEN_DTYPE}
        return verify_v4_golden(subject, folder, on_case=_ticker(arguments)), facts
    llm = _load(arguments)
    return verify_golden(llm, folder, on_case=_ticker(arguments)), {**facts, **llm.info}


def _against_laws(arguments: argparse.Namespace) -> tuple[Report, dict[str, object]]:
    from foveal.verify import V4Subject, verify_laws, verify_v4_laws

    model, family = _find(arguments.model)
    if family == "deepseek_v4":
        if arguments.dtype != GOLDEN_DTYPE:
            raise UsageError(
                f"--dtype {arguments.dtype}: DeepSeek-V4's laws are checked in float32; in half precision, "
                "rows computed alone and together choose other experts now and then"
            )
        subject = V4Subject(model, device=arguments.device, dtype=arguments.dtype)
        facts: dict[str, object] = {"model": model.name, "family": family, "dtype": arguments.dtype}
        return verify_v4_laws(subject, on_case=_ticker(arguments)), facts
    llm = _load(arguments)
    return verify_laws(llm, on_case=_ticker(arguments)), llm.info


def _find(name: str) -> tuple[Path, str]:
    """The folder of a model and its family."""
    from foveal.models.config import read_json
    from foveal.models.hub import resolve_model
    from foveal.models.registry import detect_family

    folder = resolve_model(name)
    return folder, detect_family(read_json(folder / "config.json"))


def _load(arguments: argparse.Namespace) -> LLM:
    return load_llm(
        arguments.model,
        is_quiet=arguments.json,
        dtype=arguments.dtype,
        device=arguments.device,
        picture_mode="vendor",
    )


def _ticker(arguments: argparse.Namespace) -> Callable[[CaseResult], None] | None:
    """Says each result on a terminal's stderr as it comes; the table needs all of them first."""
    if arguments.json or not sys.stderr.isatty():
        return None

    def tick(case: CaseResult) -> None:
        note(f"{'pass' if case.is_passed else 'FAIL'} {case.name}")

    return tick


def _print(report: Report, facts: dict[str, object]) -> None:
    print(", ".join(f"{name} {value}" for name, value in facts.items() if name not in HIDDEN_FACTS))
    rows = report.rows()
    print(table(rows, right=range(2, len(rows[0]))))
    for line in report.remarks():
        print(line)
    print(report.closing_line)
