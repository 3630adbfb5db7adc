"""Accuracy of a model on fresh held-out scenes, through the public `foveal.LLM`. `python training/evaluate.py --help`.

Scenes are drawn from (seed, task, index): handwritten digits come from index 1437 on only, and the random streams
are not those of training. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from foveal import LLM, SamplingParams
from training.questions import KINDS_OF_TASK, QA, TASKS, Task, ask
from training.scenes import Scene, make_scene
from training.scoring import is_right

# Keeps the numbers of evaluation scenes apart from those of training (which count from 0).
FIRST = 10_000_000
STRIDE = 100  # scenes tried for one question


def held_out(task: Task, seed: int, index: int) -> tuple[Scene, QA]:
    """Question `index` of `task`: the first of its scenes that allows one."""
    kind = KINDS_OF_TASK[task][0]
    for attempt in range(STRIDE):
        scene = make_scene(kind, seed, FIRST + index * STRIDE + attempt, held_out=True)
        qa = ask(task, scene.content, np.random.default_rng([seed, index, attempt]))
        if qa is not None:
            return scene, qa
    raise AssertionError(f"no scene of {STRIDE} allows a question of {task}")


def answer(llm: LLM, scene: Scene, question: str) -> str:
    """Greedy, nothing guarded."""
    content = [{"type": "image", "image": scene.picture}, {"type": "text", "text": question}]
    output = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=48))
    return output.text


def accuracy(llm: LLM, task: Task, seed: int, count: int, *, show: bool = False) -> float:
    """Share of right answers on `count` held-out scenes."""
    right = 0
    for index in range(count):
        scene, qa = held_out(task, seed, index)
        said = answer(llm, scene, qa.question)
        is_good = is_right(qa, said)
        right += is_good
        if show and not is_good:
            print(f"{task} {index}: {qa.question!r} -> {said!r}, true {qa.answer!r}")
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-vl2", help="shipped id, folder or hub id")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="scenes a task")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    parser.add_argument("--show", action="store_true", help="print wrong answers")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated; all by default")
    args = parser.parse_args()
    llm = LLM(args.model)
    found: dict[str, float] = {}
    chosen = [task for task in TASKS if task in args.tasks.split(",")]
    for task in chosen:
        start = time.perf_counter()
        found[task] = round(accuracy(llm, task, args.seed, args.count, show=args.show), 4)
        if not args.json:
            print(
                f"{task:9} {found[task]:7.1%}  ({args.count} scenes, {time.perf_counter() - start:.1f} s)"
            )
    print(json.dumps({"accuracy": found}))


if __name__ == "__main__":
    main()
