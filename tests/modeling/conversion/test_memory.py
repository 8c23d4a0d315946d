"""A conversion's memory is that of its budget, whatever the size of the model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

PEAK = """
import re, sys, threading
from pathlib import Path
from modeling.conversion.convert import Options, convert
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
peak, ended = [0.0], threading.Event()
def watch():
    while not ended.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch, daemon=True)
thread.start()
for source, kind in (("hf", "trainshed"), ("hf", "nxd"), ("out-trainshed", "hf")):
    before = peak[0] = anonymous()
    convert(Path(source), Path(f"out-{kind}"), Options(kind, tensor=2, budget=32))
    print("peak", kind, peak[0] - before)
"""


def test_memory_is_bounded_by_the_budget(tmp_path):
    """For 200 MB of bf16, mostly in two tensors larger than the budget, in all three formats."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 100_000}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    shapes = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "vocab_size": 8})).state_dict()
    folder = tmp_path / "hf"
    folder.mkdir()
    config.save_pretrained(folder)
    rows = {name: 100_000 if len(t) == 8 else len(t) for name, t in shapes.items()}
    save_file(
        {n: torch.zeros(rows[n], *t.shape[1:], dtype=torch.bfloat16) for n, t in shapes.items()},
        folder / "model.safetensors",
    )
    command = [sys.executable, "-c", PEAK]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    ).stdout
    peaks = {kind: float(peak) for kind, peak in re.findall(r"peak (\w+) (.*)", printed)}  # MB
    assert peaks.keys() == {"trainshed", "nxd", "hf"}
    assert max(peaks.values()) < 100, peaks
    for kind in peaks:
        size = sum(path.stat().st_size for path in (tmp_path / f"out-{kind}").rglob("*") if path.is_file())
        assert size < 1.01 * (folder / "model.safetensors").stat().st_size
