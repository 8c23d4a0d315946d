"""Conversion against copying the files, and against transformers: `python -m benchmarks.conversion --shape 1b --folder SCRATCH`

A model of random bf16 weights in the shape of a Llama is written once. Then, in alternation and each from a cold page cache to
data on disk: its files are copied (`cp`), converted to a Trainshed checkpoint split over 8 tensor ranks, and back from that;
with --peer also loaded with `from_pretrained` and saved with `save_pretrained`. Every one runs in a process of its own, whose
anonymous memory is watched. Prints medians and ratios to copying. What was written is compared with the source, to the bit;
the exit code is 1 where it differs. `--shape 8b` takes 32 GB of disk for a time, and about that many seconds a round times the
disk's slowness.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.table import Table

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary
    "100m": (768, 2048, 12, 12, 4, 32000),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
TENSOR = 8
ROOM = 3.5  # times the model's size: source, checkpoint and what is made of it, and some more
BLOCK = 64 << 20  # elements of randomness, repeated
CONVERT = (
    "import sys, time; from pathlib import Path; from modeling.conversion.convert import Options, convert; begun = time.time(); "
    "convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(sys.argv[3], tensor=int(sys.argv[4]))); {}"
)
PEER = (
    "import sys, time, torch; from transformers import AutoModelForCausalLM; begun = time.time(); "
    "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16); "
    "model.save_pretrained(sys.argv[2]); {}"
)
ENDED = "import os; os.sync(); print('seconds', time.time() - begun)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.conversion")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument(
        "--folder", type=Path, required=True, help="where there is room, on the disk to measure"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer", action="store_true", help="transformers too, which holds the whole model in memory"
    )
    parser.add_argument("--verify", action="store_true", help="compare what was written with the source")
    parser.add_argument("--make-only", action="store_true", help="write the source, and stop")
    options = parser.parse_args()
    source = options.folder / f"source-{options.shape}"
    room = shutil.disk_usage(options.folder).free
    needed = ROOM * weights_of(SHAPES[options.shape])
    if room < needed:
        print(
            f"{options.folder} has {room / 1e9:.0f} GB left, {needed / 1e9:.0f} are needed", file=sys.stderr
        )
        return 1
    if not (source / "conversion.json").exists():
        make(source, SHAPES[options.shape])
    if options.make_only:
        return 0
    made = {name: options.folder / f"{name}-{options.shape}" for name in ("copy", "split", "back", "peer")}
    runs = {
        "cp -r": ("copy", source, [sys.executable, "-c", f"import subprocess, sys, time; begun = time.time(); "
                  f"subprocess.run(['cp', '-r', sys.argv[1], sys.argv[2]], check=True); {ENDED}"]),
        "Hugging Face to Trainshed": ("split", source, program(CONVERT, "trainshed", str(TENSOR))),
        "Trainshed to Hugging Face": ("back", made["split"], program(CONVERT, "hf", "1")),
        "from_pretrained, save_pretrained": ("peer", source, program(PEER)),
    }  # fmt: skip
    if not options.peer:
        del runs["from_pretrained, save_pretrained"]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks = dict.fromkeys(runs, 0.0)
    equal = True
    for number in range(options.rounds):
        for name, (to, start, command) in runs.items():
            shutil.rmtree(made[to], ignore_errors=True)
            forget(start)
            took, peak = measure([*command[:3], str(start), str(made[to]), *command[3:]])
            seconds[name].append(took)
            peaks[name] = max(peaks[name], peak)
            last = number == options.rounds - 1
            if last and options.verify and to in ("split", "back"):
                equal &= same(source, made[to])
            if to != "split":
                shutil.rmtree(made[to])
        shutil.rmtree(made["split"])
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    table = Table(title=f"{options.shape}: {size / 1e9:.2f} GB of bf16, medians of {options.rounds}")
    for heading in ("", "seconds", "MB/s", "to cp", "peak RssAnon, MB"):
        table.add_column(heading, justify="right" if heading else "left")
    copied = statistics.median(seconds["cp -r"])
    for name, each in seconds.items():
        middle = statistics.median(each)
        row = (f"{middle:.1f}", f"{size / 1e6 / middle:.0f}", f"{middle / copied:.2f}", f"{peaks[name]:.0f}")
        table.add_row(name, *row)
    Console().print(table)
    if options.verify:
        print("every tensor is equal" if equal else "TENSORS DIFFER")
    return 0 if equal else 1


def program(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code.format(ENDED), *arguments]


def weights_of(shape: tuple[int, ...]) -> int:
    """Bytes in bf16."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = shape
    attention = hidden * hidden * (2 * heads + 2 * kv_heads) // heads
    return 2 * (2 * vocabulary * hidden + layers * (attention + 3 * hidden * intermediate))


def make(folder: Path, shape: tuple[int, ...]) -> None:
    """A Hugging Face folder of random weights."""
    import torch

    from modeling.conversion import huggingface
    from modeling.conversion.convert import write_files
    from modeling.conversion.journal import open_journal
    from modeling.conversion.weights import Part, Weights, global_shapes
    from profiles.model import Model

    hidden, intermediate, layers, heads, kv_heads, vocabulary = shape
    model = Model(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
    )
    noise = torch.empty(BLOCK, dtype=torch.bfloat16).normal_(std=0.02)

    def part(size: tuple[int, ...]) -> Part:
        width = size[-1] if len(size) > 1 else 1
        rows = noise[: BLOCK // width * width].view(-1, *size[1:])  # repeated down the tensor
        return Part((0,) * len(size), size, torch.bfloat16, lambda: Repeated(rows, size))

    class Repeated:
        """Rows that are made when they are cut out."""

        def __init__(self, rows: torch.Tensor, size: tuple[int, ...]) -> None:
            self.rows, self.size = rows, size

        def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
            first = torch.arange(index[0].start, index[0].stop) % len(self.rows)
            return self.rows[first][(slice(None), *index[1:])]

    weights = Weights(model, {name: [part(size)] for name, size in global_shapes(model).items()})
    files = huggingface.files(weights)
    with open_journal(folder, {}, sum(file.nbytes for file in files)) as journal:
        write_files(files, folder, 32 << 20, journal)
        huggingface.finish(folder, files, weights)
        journal.finish(files, {})


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds that the program says it took, and its peak of anonymous memory in MB."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        status = Path(f"/proc/{process.pid}/status")
        while not ended.wait(0.02):
            found = re.search(r"RssAnon:\s+(\d+)", status.read_text()) if status.exists() else None
            peak = max(peak, int(found[1]) / 1000 if found else 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    out, _ = process.communicate()
    ended.set()
    if process.returncode:
        raise SystemExit(f"{command[:3]} failed")
    return float(re.findall(r"seconds ([\d.]+)", out)[-1]), peak


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def same(one: Path, other: Path) -> bool:
    from modeling.conversion import formats
    from modeling.conversion.compare import differences

    found = differences(formats.read(one, None, None), formats.read(other, None, None), 32 << 20)
    if found:
        print(json.dumps(found[:5]))
    return not found


if __name__ == "__main__":
    sys.exit(main())
