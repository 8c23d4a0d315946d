"""A checkpoint as a Hugging Face model: `python -m modeling.export --run-folder RUN --output FOLDER`, one process.

Writes model.safetensors (or numbered shards of 5 GB with an index) and config.json from the newest complete checkpoint, in the
type that the run trained in. The tokenizer's files are not its concern.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from safetensors.torch import save_file

from modeling.names import to_huggingface
from modeling.program import DTYPES
from parallel import checkpoint
from profiles.model import to_config_json
from profiles.resolve import load

SHARD_BYTES = 5 * 10**9
log = logging.getLogger("trainshed")


def export(run: Path, output: Path) -> int:
    """Write the run's newest complete checkpoint to the folder; returns its step."""
    profile = load(str(run / "profile.yaml"))
    saved = list(checkpoint.complete(run / "checkpoints"))
    if not saved:
        raise ValueError(f"run {run.name} has no complete checkpoint to export")
    step, folder = saved[-1]
    weights = to_huggingface(profile.model.architecture, checkpoint.read_global(folder))
    dtype = DTYPES[profile.train.precision]
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    output.mkdir(parents=True, exist_ok=True)
    shards: list[dict] = [{}]
    for name, tensor in tensors.items():
        size = sum(t.nbytes for t in shards[-1].values())
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    index = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, output / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
        (output / "model.safetensors.index.json").write_text(text)
    config = {**to_config_json(profile.model), "dtype": str(dtype).removeprefix("torch.")}
    (output / "config.json").write_text(json.dumps(config, indent=1))
    return step


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.export")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    step = export(options.run_folder, options.output)
    log.info(f"step {step} exported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
