"""Write a trained model as a checkpoint folder in the vendor's layout. `python training/export.py --help`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from foveal.models.config import VL2Config
from foveal.models.names import parameter_specs
from training.cells import TILE
from training.recipe import CONTEXT, checkpoint_config
from training.tokens import BOS, EOS, IMAGE, PAD, write_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "foveal" / "demo" / "demo-vl2"
SHARD = "model-00001-of-000001.safetensors"


def checkpoint_tensors(parameters: dict[str, Tensor], config: VL2Config) -> dict[str, Tensor]:
    """The vendor's tensors, bfloat16, from this package's (fused) parameters."""
    tensors = {}
    for spec in parameter_specs(config):
        for source in spec.sources:
            part = parameters[spec.name]
            if source.index is not None:
                part = part[source.index]
            piece = part[source.offset : source.offset + source.shape[0]] if source.shape else part
            tensors[source.name] = (
                piece.reshape(source.shape).to(torch.bfloat16).contiguous().clone()
            )
    return tensors


def processor_config() -> dict[str, Any]:
    """`processor_config.json`: pictures are padded to one tile (spec 1.6)."""
    return {
        "add_special_token": False,
        "candidate_resolutions": [[TILE, TILE]],
        "downsample_ratio": 2,
        "ignore_id": -100,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": IMAGE,
        "mask_prompt": False,
        "normalize": True,
        "pad_token": PAD,
        "patch_size": 8,
        "processor_class": "DeepseekVLV2Processor",
        "sft_format": "deepseek",
    }


def write_checkpoint(folder: Path, parameters: dict[str, Tensor], tokenizer: Tokenizer) -> int:
    """Write all files of the model; returns their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = [tokenizer.token_to_id(t) for t in (BOS, EOS)]
    values = checkpoint_config(tokenizer.get_vocab_size(), *ids)
    tensors = checkpoint_tensors(parameters, VL2Config.from_dict(values))
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    (folder / SHARD).chmod(0o644)  # safetensors creates it readable by its owner only
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), SHARD)}
    for name, content in (
        ("config.json", values),
        ("processor_config.json", processor_config()),
        ("model.safetensors.index.json", index),
    ):
        (folder / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    write_tokenizer(tokenizer, folder, CONTEXT)
    return sum(path.stat().st_size for path in folder.iterdir())


def write_log(source: Path, target: Path, last: int) -> None:
    """Copy a log up to step `last`; of steps that were done twice (after an interruption) the later entry stays."""
    entries = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        step = json.loads(line)["step"]
        if step <= last:
            entries[step] = line
    target.write_text("".join(f"{entries[step]}\n" for step in sorted(entries)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", default="demo-vl2", help="name of the run's folder under training/.cache"
    )
    parser.add_argument("--to", type=Path, default=DEMO, help="folder to write")
    parser.add_argument("--no-log", action="store_true", help="leave training/logs alone")
    args = parser.parse_args()
    run = Path(__file__).parent / ".cache" / args.run
    state = torch.load(run / "state.pt", weights_only=True)
    prefix = "model."
    parameters = {
        n.removeprefix(prefix): t for n, t in state["learner"].items() if n.startswith(prefix)
    }
    size = write_checkpoint(args.to, parameters, Tokenizer.from_str(state["tokenizer"]))
    if not args.no_log:
        logs = Path(__file__).parent / "logs"
        logs.mkdir(exist_ok=True)
        write_log(run / "log.jsonl", logs / f"{args.run}.jsonl", int(state["step"]))
    print(f"step {state['step']}: {size / 1e6:.2f} MB in {args.to}")


if __name__ == "__main__":
    main()
