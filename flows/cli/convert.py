"""`trainshed convert`: a checkpoint of any kind as one of another kind, and two of any kinds compared."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from botocore.exceptions import NoCredentialsError

from flows.ui.console import say
from modeling.conversion import formats
from modeling.conversion.compare import differences
from modeling.conversion.convert import convert, options_of
from profiles.errors import ProfileError
from tasks.sources import weights

DONE, FAILED, REFUSED = 0, 1, 2


def run(given: argparse.Namespace) -> int:
    """Convert, compare, or both; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("trainshed").setLevel(logging.INFO)
    if given.to is None and not given.verify:
        reason = "is missing: name the kind of checkpoint to make; to compare two, --verify"
        raise ProfileError("--to", None, reason, ["hf", "nxd", "trainshed"])
    if "://" in given.destination:
        raise ProfileError("DESTINATION", given.destination, "is not a folder on this machine")
    destination = Path(given.destination).expanduser()
    options = options_of(given)
    facts: dict[str, object] = {"destination": str(destination)}
    try:
        with weights.fetch(given.source, given.revision, target=destination) as source:
            if given.to:
                record = convert(source, destination, options, name=given.source)
                facts |= {name: value for name, value in record.items() if name != "job"}
            if given.verify:
                one = formats.read(formats.locate(source), options.config, options.nxd_layout)
                # What we write is in the trn1 layout, whatever the source was in.
                layout = "trn1" if given.to else options.nxd_layout
                other = formats.read(formats.locate(destination), options.config, layout)
                found = differences(one, other, options.slice_bytes)
                facts["equal"] = len(one.shapes) - len(found)
                if found:
                    say(f"trainshed: {len(found)} of {len(one.shapes)} tensors differ")
                    say("\n".join(found))
                    if given.json:
                        print(json.dumps({**facts, "differ": found}, indent=1))
                    return FAILED
    except ProfileError:
        raise
    except NoCredentialsError:
        reason = "needs credentials for S3, and there are none: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
        raise ProfileError("SOURCE", given.source, reason) from None
    except ValueError as error:
        say(f"trainshed: {error}")
        return REFUSED
    except (OSError, RuntimeError) as error:
        say(f"trainshed: {error}")
        say("the same command goes on from where this one got to")
        return FAILED
    _show(facts, as_json=given.json)
    return DONE


def _show(facts: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    if "files" in facts:
        size = facts["bytes"] / 1e6
        print(
            f"{facts['tensors']} tensors, {size:,.1f} MB in {len(facts['files'])} files: {facts['destination']}"
        )
    if "equal" in facts:
        print(f"all {facts['equal']} tensors are equal to the source's")
