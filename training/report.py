"""Measure a model and write the table into `docs/demo-model.md`. `python training/report.py --help`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from foveal import LLM
from training.evaluate import accuracy
from training.questions import TASKS, Task

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "demo-model.md"
BEGIN, END = "<!-- accuracy: written by training/report.py -->", "<!-- end of accuracy -->"
GOALS: dict[Task, float] = {
    "colour": 0.97,
    "shape": 0.97,
    "relation": 0.95,
    "count": 0.95,
    "digit": 0.93,
    "locate": 0.90,
    "word": 0.85,
}
MEANINGS: dict[Task, str] = {
    "colour": "the exact word",
    "shape": "the exact word",
    "relation": "the exact word; a third of the questions ask for yes or no",
    "count": "the exact number, one to five",
    "digit": "handwritten digits from index 1437 on",
    "locate": "right label, and intersection over union of at least 0.5",
    "word": "all of one to five letters; seven in ten are random letters",
}


def table(found: dict[Task, float], seed: int, count: int) -> str:
    """Rows of the document: measured share with its standard error, the goal, what counts as right."""
    lines = [
        f"`.venv/bin/python training/evaluate.py --model demo-vl2 --seed {seed} --count {count}`, greedy, float32:",
        "",
        "| task | right | goal | what counts |",
        "|---|---|---|---|",
    ]
    for task, share in found.items():
        error = math.sqrt(share * (1 - share) / count)
        mark = "" if share >= GOALS[task] else " (missed)"
        lines.append(
            f"| {task} | {share:.1%} ± {error:.1%} | {GOALS[task]:.0%}{mark} | {MEANINGS[task]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-vl2")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--count", type=int, default=300, help="scenes a task")
    args = parser.parse_args()
    llm = LLM(args.model, dtype="float32")
    found = {task: accuracy(llm, task, args.seed, args.count) for task in TASKS}
    text = DOCUMENT.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, maxsplit=1)
    tail = rest.split(END, maxsplit=1)[1]
    written = table(found, args.seed, args.count)
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{written}\n\n{END}{tail}", encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
