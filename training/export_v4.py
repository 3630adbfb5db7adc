"""Write a trained demo-v4 as a checkpoint folder in the vendor's layout. `python training/export_v4.py --help`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from foveal.models.v4_config import V4Config
from foveal.models.v4_names import v4_parameter_specs
from training.recipe import CONTEXT
from training.v4_recipe import checkpoint_config
from training.v4_tokens import write_v4_tokenizer

DEMO = Path(__file__).resolve().parents[1] / "foveal" / "demo" / "demo-v4"
SHARD = "model-00001-of-000001.safetensors"
# Endings of the names that the release stores in float32 (spec 2.1); tables of experts are int64, the rest is bfloat16.
FLOAT32 = (".attn_sink", ".ape", "_fn", "_base", "_scale", ".bias_vl", ".gate.bias")


def stored_type(name: str) -> torch.dtype:
    """The type of a tensor in the vendor's files."""
    if name.endswith(".tid2eid"):
        return torch.int64
    return torch.float32 if name.endswith(FLOAT32) else torch.bfloat16


def v4_checkpoint_tensors(parameters: dict[str, Tensor], config: V4Config) -> dict[str, Tensor]:
    """The vendor's tensors from this package's (fused) parameters."""
    tensors = {}
    for spec in v4_parameter_specs(config):
        for source in spec.sources:
            part = parameters[spec.name]
            if source.index is not None:
                part = part[source.index]
            piece = part[source.offset : source.offset + source.shape[0]]
            tensors[source.name] = (
                piece.reshape(source.shape).to(stored_type(source.name)).contiguous().clone()
            )
    return tensors


def write_v4_checkpoint(folder: Path, parameters: dict[str, Tensor], tokenizer: Tokenizer) -> int:
    """Write all files of the model; returns their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    values = checkpoint_config(tokenizer.get_vocab_size())
    tensors = v4_checkpoint_tensors(parameters, V4Config.from_dict(values))
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), SHARD)}
    for name, content in (("config.json", values), ("model.safetensors.index.json", index)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    write_v4_tokenizer(tokenizer, folder, CONTEXT)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", default="demo-v4", help="name of the run's folder under training/.cache"
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
    size = write_v4_checkpoint(args.to, parameters, Tokenizer.from_str(state["tokenizer"]))
    if not args.no_log:
        logs = Path(__file__).parent / "logs"
        logs.mkdir(exist_ok=True)
        shutil.copyfile(run / "log.jsonl", logs / f"{args.run}.jsonl")
    print(f"step {state['step']}: {size / 1e6:.2f} MB in {args.to}")


if __name__ == "__main__":
    main()
