"""`trainshed convert`: convert a checkpoint to another format, compare two, or both."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from botocore.exceptions import NoCredentialsError

from flows.cli.exit_codes import DONE, FAILED, REJECTED
from flows.ui.console import print_json, print_stderr
from modeling import job_log
from modeling.conversion import formats
from modeling.conversion.choices import FORMATS
from modeling.conversion.compare import differences
from modeling.conversion.convert import Options, convert, options_from, write_peft
from profiles.errors import ProfileError, counted
from profiles.files import state_files
from profiles.local_paths import RUN
from tasks.reporting.format import format_bytes
from tasks.sources import weights
from tasks.store.backends.objects import NO_CREDENTIALS
from trainshed import PACKAGES

LISTED = 20  # tensors that differ


def run(options: argparse.Namespace) -> int:
    """Convert, compare, or both; returns the exit code."""
    job_log.configure(sys.stderr, logging.WARNING)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)
    if options.to is None and not options.verify:
        reason = "is missing; give the format to write, or --verify to compare two checkpoints"
        raise ProfileError("--to", None, reason, list(FORMATS))
    if options.to == "peft" and (options.verify or options.adapters):
        reason = "writes only the adapters in SOURCE; it cannot be combined with --verify or --adapters"
        raise ProfileError("--to", "peft", reason, ["hf"])
    if options.adapters and options.verify:
        reason = "compares with SOURCE, without the adapters; it cannot be combined with --adapters"
        raise ProfileError("--verify", None, reason)
    if options.average and (options.verify or options.adapters or options.to == "peft"):
        reason = "writes averaged weights; it cannot be combined with --verify, --adapters or --to peft"
        raise ProfileError("--average", None, reason)
    _reject_unused(options)
    if "://" in options.destination:
        raise ProfileError("DESTINATION", options.destination, "is not a local folder")
    if options.source.startswith(RUN):
        run_folder = Path("store/runs", options.source.removeprefix(RUN))
        raise ProfileError("SOURCE", options.source, "is a run; name its folder", [str(run_folder)])
    destination = Path(options.destination).expanduser()
    conversion = options_from(options)
    facts: dict[str, object] = {"destination": str(destination)}
    different: list[str] = []
    try:
        with weights.fetch(
            options.source, options.revision, target=destination, checkpoints=conversion.last or 1
        ) as source:
            if options.to == "peft":
                facts |= write_peft(source, destination, conversion)
            elif options.to:
                record = convert(source, destination, conversion, name=options.source)
                facts |= {name: value for name, value in record.items() if name != "job"}
            if options.verify:
                compared, different = _compare(source, destination, conversion, converted=bool(options.to))
                facts["equal"] = compared - len(different)
    except ProfileError as error:
        run_folder = Path("store/runs", options.source)
        if error.key == "SOURCE" and state_files.is_dir(run_folder):
            raise error.with_choices([str(run_folder)]) from None
        raise
    except NoCredentialsError:
        raise ProfileError("SOURCE", options.source, NO_CREDENTIALS) from None
    except ValueError as error:
        named = any(str(folder) in str(error) for folder in (options.source, destination))
        print_stderr(f"trainshed: {error}" if named else f"trainshed: SOURCE = {options.source}: {error}")
        return REJECTED
    except (OSError, RuntimeError) as error:
        print_stderr(f"trainshed: {error}")
        if options.to == "peft":
            print_stderr("empty DESTINATION and run the same command again")
        elif options.to:
            print_stderr("run the same command again to resume")
        return FAILED
    if different:
        print_stderr(f"trainshed: {len(different):,} of {compared:,} tensors differ")
        print_stderr("\n".join(different[:LISTED]))
        if len(different) > LISTED:
            print_stderr(f"and {len(different) - LISTED:,} more")
        if options.json:
            print_json({**facts, "differ": different})
        return FAILED
    _print(facts, as_json=options.json)
    return DONE


def _reject_unused(options: argparse.Namespace) -> None:
    """Raise ProfileError for an option that the format to write does not use."""
    for axis in ("tensor", "pipeline"):
        if (degree := getattr(options, axis)) != 1 and options.to not in ("nxd", "trainshed"):
            reason = f"is used only with --to nxd and --to trainshed, not {options.to or '--verify'}"
            raise ProfileError(f"--{axis}", degree, reason)
    if options.nxd_qkv and options.to != "nxd":
        raise ProfileError("--nxd-qkv", options.nxd_qkv, "is used only with --to nxd")
    if options.revision and state_files.exists(Path(options.source).expanduser()):
        raise ProfileError(
            "--revision", options.revision, "is used only with a hub repository; SOURCE is local"
        )


def _compare(source: Path, destination: Path, options: Options, *, converted: bool) -> tuple[int, list[str]]:
    """The number of tensors, and a line for each that differs."""
    expected = formats.read(formats.locate(source), options.config, options.nxd_layout)
    expected = expected if options.modules else expected.without_modules()
    layout = "trn1" if converted else options.nxd_layout  # the only layout that `convert` writes
    try:
        actual = formats.read(formats.locate(destination), options.config, layout)
    except ProfileError as error:
        if error.key == "SOURCE":
            raise ProfileError("DESTINATION", error.value, error.reason) from None
        raise
    return len(expected.shapes), differences(expected, actual, options.slice_bytes)


def _print(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    if "files" in facts:
        size = f"{format_bytes(facts['bytes'])} in {counted(len(facts['files']), 'file')}"
        print(f"{counted(facts['tensors'], 'tensor')}, {size}: {facts['destination']}")
    if "equal" in facts:
        print(f"all {facts['equal']:,} tensors are equal")
