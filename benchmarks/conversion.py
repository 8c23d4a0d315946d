"""Compare checkpoint conversion with file copies and with transformers: --shape 1b --folder SCRATCH

Writes a Llama with random bf16 weights once. Then it alternately copies the files (`cp`), converts them to a Trainshed checkpoint
of 8 tensor ranks, and converts that back; with --peer it also loads them with `from_pretrained` and saves them with
`save_pretrained`. Each starts with a cold page cache, ends when the data is on disk, and runs in its own process, whose anonymous
memory is polled. Prints medians, and ratios to copying. With --verify, the exit code is 1 if a converted tensor differs from the
source in any bit. `--shape 8b` needs up to 56 GB of disk.
"""

import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.processes import peak_memory
from benchmarks.harness.results import Results
from benchmarks.harness.timing import alternate, make_parser, print_table
from benchmarks.harness.workload import llama
from profiles.sections.model import Model

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary
    "100m": (768, 2048, 12, 16, 4, 32000),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
TENSOR = 8
SPACE = 3.5  # free disk space required, in sizes of the model
BLOCK = 64 << 20  # random elements, repeated
FINISH = "import os; os.sync(); print('seconds', time.time() - start)"
COPY = f"import subprocess, sys, time; start = time.time(); subprocess.run(['cp', '-r', *sys.argv[1:]], check=True); {FINISH}"
CONVERT = (
    "import sys, time; from pathlib import Path; from modeling.conversion.convert import Options, convert; "
    "start = time.time(); source, target, format, tensor = sys.argv[1:]; "
    f"convert(Path(source), Path(target), Options(format, tensor=int(tensor))); {FINISH}"
)
PEER = (
    "import sys, time, torch; from transformers import AutoModelForCausalLM; start = time.time(); "
    "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16); "
    f"model.save_pretrained(sys.argv[2]); {FINISH}"
)


def main() -> int:
    parser = make_parser(__doc__, rounds=3, out="conversion")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder on the disk to measure")
    parser.add("--peer", "also measure transformers, which needs memory for the model")
    parser.add("--verify", "compare converted tensors with the source")
    options = parser.parse_args()
    source = options.folder / f"source-{options.shape}"
    free = shutil.disk_usage(options.folder).free
    needed = SPACE * bf16_bytes(SHAPES[options.shape])
    if free < needed:
        parser.error(f"--folder {options.folder}: {free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB needed")
    keep = Results(options.out).turn
    if not (source / "conversion.json").exists():
        write_model(source, llama(*SHAPES[options.shape], max_position_embeddings=8192))
    split = options.folder / f"split-{options.shape}"
    back = options.folder / f"back-{options.shape}"
    programs: dict[str, tuple[Path, Path, str, tuple[str, ...]]] = {
        "cp -r": (source, options.folder / f"copy-{options.shape}", COPY, ()),
        "Hugging Face to Trainshed": (source, split, CONVERT, ("trainshed", str(TENSOR))),
        "Trainshed to Hugging Face": (split, back, CONVERT, ("hf", "1")),
    }
    if options.peer:
        target = options.folder / f"peer-{options.shape}"
        programs["from_pretrained, save_pretrained"] = (source, target, PEER, ())
    equal: list[bool] = []

    def side(
        start: Path, target: Path, code: str, arguments: Sequence[str]
    ) -> Callable[[], tuple[float, int]]:
        def run() -> tuple[float, int]:
            shutil.rmtree(target, ignore_errors=True)
            drop_page_cache(start)
            command = [sys.executable, "-c", code, str(start), str(target), *arguments]
            output, peak = peak_memory(command, "RssAnon")
            if options.verify and code == CONVERT and len(equal) < 2:
                equal.append(same_tensors(source, target))
            if target != split:
                shutil.rmtree(target)
            return float(re.findall(r"seconds ([\d.]+)", output)[-1]), peak

        return run

    sides = {name: side(*program) for name, program in programs.items()}
    results = alternate(sides, options.rounds, after_round=lambda: shutil.rmtree(split), keep=keep)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    median = {name: statistics.median(seconds for seconds, _ in runs) for name, runs in results.items()}
    print_table(
        f"{options.shape}: {size / 1e9:.2f} GB of bf16, medians of {options.rounds}",
        ("", "seconds", "MB/s", "to cp", "peak RssAnon, MB"),
        [
            (name, f"{seconds:.1f}", f"{size / 1e6 / seconds:.0f}", f"{seconds / median['cp -r']:.2f}",
             f"{max(peak for _, peak in results[name]) / 1e6:.0f}")
            for name, seconds in median.items()
        ],
    )  # fmt: skip
    if options.verify:
        print("all tensors are equal" if all(equal) else "TENSORS DIFFER")
    return 0 if all(equal) else 1


def bf16_bytes(shape: tuple[int, ...]) -> int:
    """Size of a model's weights in bf16."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = shape
    attention = hidden * hidden * (2 * heads + 2 * kv_heads) // heads
    return 2 * (2 * vocabulary * hidden + layers * (attention + 3 * hidden * intermediate))


def write_model(folder: Path, model: Model) -> None:
    """Write a Hugging Face folder of random weights."""
    import torch

    from modeling.conversion import huggingface
    from modeling.conversion.convert import write_files
    from modeling.conversion.journal import open_journal
    from modeling.conversion.weights import Part, Weights, global_shapes

    noise = torch.empty(BLOCK, dtype=torch.bfloat16).normal_(std=0.02)

    def repeat(rows: torch.Tensor, index: tuple[slice, ...]) -> torch.Tensor:
        """Elements of a tensor that repeats some rows."""
        positions = torch.arange(index[0].start, index[0].stop) % len(rows)
        return rows[positions][(slice(None), *index[1:])]

    def part(size: tuple[int, ...]) -> Part:
        width = size[-1] if len(size) > 1 else 1
        rows = noise[: BLOCK // width * width].view(-1, *size[1:])
        return Part((0,) * len(size), size, torch.bfloat16, partial(repeat, rows))

    weights = Weights(model, {name: [part(size)] for name, size in global_shapes(model).items()})
    files = huggingface.files(weights)
    with open_journal(folder, {}, sum(file.nbytes for file in files)) as journal:
        write_files(files, folder, 32 << 20, journal)
        huggingface.finish(folder, files, weights)
        journal.finish(files, {})


def drop_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def same_tensors(folder: Path, other: Path) -> bool:
    """Whether two checkpoints are equal, bit for bit; prints the first differences."""
    from modeling.conversion import formats
    from modeling.conversion.compare import differences

    found = differences(formats.read(folder, None, None), formats.read(other, None, None), 32 << 20)
    if found:
        print(json.dumps(found[:5]))
    return not found


if __name__ == "__main__":
    sys.exit(main())
