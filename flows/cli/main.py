"""The `trainshed` command: its arguments, errors and exit codes.

A subcommand's module is imported when it is called, so that `--help` and `profiles` load neither torch nor Prefect.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import locale
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from flows.cli.arguments import HelpFormatter, Parser, integer, override
from flows.cli.exit_codes import DONE, FAILED, REJECTED
from flows.ui.console import one_line, print_stderr, redirect_to_devnull, save_traceback
from modeling import start
from modeling.conversion.choices import FORMATS, NXD_LAYOUTS, QKV_FORM_NAMES
from profiles.errors import ProfileError
from profiles.files.state_files import CorruptedState


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code; errors are printed in one line."""
    if arguments is None:
        _use_utf8()
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given or ["--help"])
    try:
        module, _, function = options.function.partition(":")
        code: int = getattr(importlib.import_module(f"flows.cli.{module}"), function)(options)
        sys.stdout.flush()  # a closed pipe raises here, not at the interpreter's exit
        return code
    except ProfileError as error:
        print_stderr(f"trainshed: {error}")
        return REJECTED
    except KeyboardInterrupt:
        print_stderr("trainshed: interrupted")
        return FAILED
    except BrokenPipeError:  # for instance `trainshed profiles | head -1`
        redirect_to_devnull(sys.stdout)
        return DONE
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich exits on a closed pipe
            return DONE
        raise
    except Exception as error:
        print_stderr(f"trainshed: {one_line(error)}")
        if not isinstance(error, (OSError, CorruptedState)):  # whose messages suffice
            print_stderr(f"traceback: {save_traceback()}")
        return FAILED


def _use_utf8() -> None:
    """Restart Python in UTF-8 mode if the locale's encoding is another; child processes inherit the mode.

    With LANG=de_DE.ISO-8859-1, for instance, profiles would be read, and reports written, in that encoding. For the locales C
    and POSIX, Python itself does this.
    """
    if codecs.lookup(locale.getencoding()).name != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    start.replace_unencodable()
    os.environ.pop(
        "PYTHONIOENCODING", None
    )  # child processes write to files and pipes, which are read as UTF-8


def parser() -> argparse.ArgumentParser:
    """The parser of the complete command line."""
    root = Parser(
        prog="trainshed",
        epilog="example: trainshed run tiny    (trainshed COMMAND --help for details)",
        formatter_class=HelpFormatter,
        add_help=False,
    )
    root.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # a screen has 24 lines
    root.add_argument("--version", action="version", version=_version(), help=argparse.SUPPRESS)
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_training(commands)
    _add_experiments(commands)
    _add_stores(commands)
    _add_planning(commands)
    _add_tools(commands)
    return root


def _version() -> str:
    return f"trainshed {metadata.version('trainshed')}"


def _add_training(commands: Any) -> None:
    """Add run, chain and fork."""
    about = "run a profile, from the tokenizer to the exported model"
    run = _command(commands, "run", "PROFILE", about, "trainshed run tiny --name first")
    _profile(run)
    _store(run)
    run.add_argument("--name", help="the run's name (default: the profile's)")
    _update(run)
    about = "move a different run of this name to NAME~N"
    run.add_argument("--replace", action="store_true", help=about)
    about = "start from the model of run:NAME or of a folder"
    run.add_argument("--from", dest="source", default="", metavar="MODEL", help=about)
    run.add_argument("--until", default="", metavar="STEP", help="end after a step, for instance graphs")
    about = "only print the training job: script or manifests"
    run.add_argument("--dry-run", action="store_true", help=about)
    run.set_defaults(fork=None)
    _json(run)

    about = "train profiles in a chain, each from the previous export"
    example = "trainshed chain tiny tiny-sft tiny-dpo"
    chain = _command(commands, "chain", "PROFILE [PROFILE ...]", about, example, "run:chain")
    chain.add_argument(
        "profiles", nargs="+", metavar="PROFILE", help="profiles' names or paths of YAML files"
    )
    _overrides(chain, "; PROFILE:KEY.PATH=VALUE for one profile")
    _store(chain)
    chain.add_argument("--name", help="prefix of the runs' names: NAME-PROFILE")
    about = "if these names belong to runs with another model, data or training, move them to NAME~N and start over"
    chain.add_argument("--replace", action="store_true", help=about)
    _json(chain)

    about = "start a new run from another run's checkpoint"
    example = "trainshed fork tiny@600 colder --set train.learning_rate=1e-3"
    fork = _command(commands, "fork", "RUN[@STEP] NEW", about, example, "runs.fork:run")
    about = "a run, and a checkpoint's step (default: latest)"
    fork.add_argument("parent", metavar="RUN[@STEP]", help=about)
    fork.add_argument("name", metavar="NEW", help="name of the new run")
    _overrides(fork)
    about = "decay the learning rate to 0 in STEPS, and end"
    fork.add_argument("--decay", type=integer(1), metavar="STEPS", help=about)
    _store(fork)
    _update(fork)
    fork.set_defaults(dry_run=False, until="", source="")
    about = "cluster.work_dir (default: the parent's)"
    fork.add_argument("--work-dir", metavar="FOLDER", help=about)
    _json(fork)


def _add_experiments(commands: Any) -> None:
    """Add ladder, mixture and branches, which plan or train the runs that a file describes."""
    about = "forecast a run's loss from smaller runs"
    action = "plan: show the rungs and their cost; run: train the missing ones, and write the forecast"
    ladder = _experiment(commands, "ladder", "training/ladder.md", about, action)
    about = "run: also train the target, once its forecast is in the store"
    ladder.add_argument("--target", action="store_true", help=about)

    about = "find weights for a run's data sources from small runs"
    action = (
        "plan: show the proxies and their cost; run: train the missing ones, and propose weights; share: train small rounds of a "
        "continual series, and propose its share of replay, from a share file (docs/training/continual.md)"
    )
    mixture = _experiment(commands, "mixture", "training/mixtures.md", about, action, ("share",))
    about = "run: also train a proxy with the proposed weights, and compare it with its forecast"
    mixture.add_argument("--check", action="store_true", help=about)

    about = "compare training lengths as branches of a single trunk"
    action = "plan: show the runs and their cost; run: train the missing ones, and compare all"
    _experiment(commands, "branches", "training/branches.md", about, action)


def _experiment(
    commands: Any, name: str, page: str, about: str, action: str, others: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Add a command that plans or runs a file.

    Args:
        page: of docs/, which describes the file's format.
        others: further actions.
    """
    example = f"trainshed {name} plan {name}.yaml"
    actions = ("plan", "run", *others)
    shown = "|".join(actions)
    command = _command(commands, name, f"{shown} FILE", about, example, f"experiments:{name}")
    command.add_argument("action", choices=actions, metavar=shown, help=action)
    command.add_argument("file", metavar="FILE", help=f"a {name} file (docs/{page})")
    _store(command)
    _json(command)
    return command


def _add_stores(commands: Any) -> None:
    """Add runs, evaluate, series, promote, fleet and gc."""
    about = "list the runs of a store, with their state and size"
    runs = _command(commands, "runs", "", about, "trainshed runs", "runs.runs:run")
    _store(runs)
    _json(runs)

    about = "evaluate checkpoints: held-out loss, language-model tasks"
    example = "trainshed evaluate tiny --task hellaswag --limit 100"
    evaluate = _command(commands, "evaluate", "RUN[@STEP]", about, example)
    about = "a run, and one checkpoint's step (default: all)"
    evaluate.add_argument("run", metavar="RUN[@STEP]", help=about)
    about = "task of lm-evaluation-harness (extra lm-eval); repeatable; default: only held-out loss"
    evaluate.add_argument("--task", dest="tasks", action="append", default=[], metavar="NAME", help=about)
    evaluate.add_argument("--include", default="", metavar="FOLDER", help="folder with your own task files")
    evaluate.add_argument("--limit", type=integer(1), metavar="N", help="maximum examples per task")
    about = "wait for further checkpoints until the run ends"
    evaluate.add_argument("--follow", action="store_true", help=about)
    _overrides(evaluate)
    _store(evaluate)
    about = "local folder for run folders if the store is on S3, like cluster.work_dir"
    _with_default(evaluate, "--work-dir", "./store", about, metavar="FOLDER")
    _json(evaluate)

    about = "show the rounds of a continual series, with their losses"
    series = _command(commands, "series", "NAME", about, "trainshed series tiny", "runs.series:run")
    series.add_argument("name", metavar="NAME", help="the series: the name of its first run")
    _store(series)
    _with_default(series, "--output", "series.html", "HTML page to write", metavar="FILE")
    _json(series)

    about = "make an earlier model of a series the promoted one again"
    promote = _command(
        commands, "promote", "NAME RUN", about, "trainshed promote tiny tiny-round-1", "runs.series:promote"
    )
    promote.add_argument("name", metavar="NAME", help="the series: the name of its first run")
    promote.add_argument("run", metavar="RUN", help="a run that was promoted: a round's, or the first")
    _store(promote)
    _json(promote)

    about = "write a page of all runs: progress, speed, goodput, cost"
    fleet = _command(commands, "fleet", "", about, "trainshed fleet --output fleet.html", "runs.runs:fleet")
    _store(fleet)
    _with_default(fleet, "--output", "fleet.html", "HTML page to write", metavar="FILE")
    _json(fleet)

    about = "show or remove files of a store that no run refers to"
    collect = _command(commands, "gc", "", about, "trainshed gc", "runs.runs:gc")
    _store(collect)
    collect.add_argument("--yes", action="store_true", help="remove the listed files")
    _json(collect)


def _add_planning(commands: Any) -> None:
    """Add plan and up."""
    about = "plan a run: memory, communication, step time and cost"
    plan = _command(commands, "plan", "PROFILE", about, "trainshed plan tiny")
    _profile(plan)
    about = "rank the topologies that fit the profile's cluster, and show why others are rejected"
    plan.add_argument("--search", action="store_true", help=about)
    about = "print what this profile would run again of an existing run, and why"
    plan.add_argument("--changes", metavar="RUN", default="", help=about)
    _store(plan)
    _json(plan)

    about = "start a Prefect server and a worker on this machine"
    up = _command(commands, "up", "", about, "trainshed up")
    _with_default(up, "--port", 4200, "port of the UI and the API", type=integer(1, 65535), metavar="PORT")
    about = "only register, with the server of PREFECT_API_URL"
    up.add_argument("--register", action="store_true", help=about)
    about = "register the deployments of all shipped profiles, not only of those that can start from here"
    up.add_argument("--all", action="store_true", help=about)
    about = "send alerts to this Prefect notification block, such as slack-webhook/team"
    up.add_argument("--alerts", metavar="TYPE/NAME", help=about)
    about = "evaluate each checkpoint once it is complete, and run these lm-evaluation-harness tasks on it"
    up.add_argument("--evaluate", nargs="*", metavar="TASK", help=about)


def _add_tools(commands: Any) -> None:
    """Add convert, profiles, compare, tensorboard and import-config."""
    about = "convert a checkpoint, or compare two checkpoints"
    example = "trainshed convert ./nxd ./model --to hf --config config.json"
    _conversion(_command(commands, "convert", "SOURCE DESTINATION", about, example))

    about = "list the shipped profiles"
    command = _command(commands, "profiles", "[WORD]", about, "trainshed profiles llama3")
    about = "list only profiles with WORD in their name"
    command.add_argument("word", metavar="WORD", nargs="?", default="", help=about)
    _json(command)

    about = "compare runs: metrics, profile differences and loss curves"
    example = "trainshed compare first second --output compare.html"
    compare = _command(commands, "compare", "RUN [RUN ...]", about, example, "runs.compare:run")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a run's name, or the path of its folder")
    _store(compare)
    _with_default(compare, "--output", "compare.html", "HTML page to write", metavar="FILE")
    _json(compare)

    about = "start TensorBoard for one run, or for all runs of a store"
    tensorboard = _command(
        commands, "tensorboard", "[RUN]", about, "trainshed tensorboard tiny", "runs.tensorboard:run"
    )
    tensorboard.add_argument("run", nargs="?", metavar="RUN", help="a run's name, or the path of its folder")
    _store(tensorboard)
    _with_default(tensorboard, "--port", 6006, "port on loopback", type=integer(1, 65535), metavar="PORT")

    about = "convert an NxD Training config to a profile"
    example = "trainshed import-config hf_llama3_70B_config.yaml"
    importer = _command(commands, "import-config", "CONFIG [OUT]", about, example)
    importer.add_argument("config", metavar="CONFIG", help="NxD Training config to convert")
    about = "profile to write (default: ./NAME.yaml for the config NAME_config.yaml)"
    importer.add_argument("out", metavar="OUT", nargs="?", help=about)
    about = "the model's config.json, if the one that CONFIG names is elsewhere"
    importer.add_argument("--config", dest="model_config", metavar="FILE", help=about)
    about = "plan a new topology for this hardware; keep batch and schedule"
    importer.add_argument("--hardware", choices=("trn2", "h200"), help=about)
    importer.add_argument("--verbose", action="store_true", help="list every key of the config")
    _json(importer)


def _command(
    commands: Any, name: str, operands: str, about: str, example: str, function: str = ""
) -> argparse.ArgumentParser:
    """Add a subcommand.

    Args:
        function: that runs it, MODULE:NAME in this package; empty: `run` in the module of the same name.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        usage=f"trainshed {name} [OPTIONS] {operands}".rstrip(),
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"example: {example}",
        formatter_class=HelpFormatter,
    )
    command.set_defaults(function=function or f"{name.replace('-', '_')}:run")
    return command


def _profile(command: argparse.ArgumentParser) -> None:
    about = "a profile's name or the path of a YAML file"
    command.add_argument("profile", metavar="PROFILE", help=about)
    _overrides(command)


def _overrides(command: argparse.ArgumentParser, more: str = "") -> None:
    about = f"override a profile key, for instance train.steps=100{more}; repeatable"
    command.add_argument(
        *("-s", "--set"),
        dest="overrides",
        type=override,
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help=about,
    )


def _update(command: argparse.ArgumentParser) -> None:
    about = "resolve inputs again, not from the run's lockfile"
    command.add_argument("--update", action="store_true", help=about)


def _conversion(command: argparse.ArgumentParser) -> None:
    about = "run, checkpoint, HF or NxD folder; hub repository"
    command.add_argument("source", metavar="SOURCE", help=about)
    about = "folder to write, or with --verify to compare"
    command.add_argument("destination", metavar="DESTINATION", help=about)
    about = f"format to write: {', '.join(FORMATS)}"
    command.add_argument("--to", choices=FORMATS, metavar="FORMAT", help=about)
    about = "average N latest checkpoints, or SOURCE and PATHs"
    command.add_argument("--average", metavar="N|PATH", action="append", default=[], help=about)
    about = "merge LoRA adapters of a run, NxD or PEFT folder"
    command.add_argument("--adapters", metavar="PATH", help=about)
    command.add_argument("--verify", action="store_true", help="compare both checkpoints tensor by tensor")
    command.add_argument("--revision", help="commit, tag or branch of a hub repository")
    command.add_argument("--config", metavar="PATH", help="the model's config.json; required for NxD shards")
    for axis in ("tensor", "pipeline"):
        _with_default(command, f"--{axis}", 1, f"{axis}-parallel degree to write", type=int, metavar="N")
    about = "KV head order of shards to read (writes only trn1)"
    command.add_argument("--nxd-layout", choices=NXD_LAYOUTS, help=about)
    about = f"Q, K, V in NxD shards: {', '.join(QKV_FORM_NAMES)}"
    command.add_argument("--nxd-qkv", choices=QKV_FORM_NAMES, metavar="FORM", help=about)
    about = "leave out modules for multi-token prediction"
    command.add_argument("--without-mtp", action="store_true", help=about)
    _json(command)


def _store(command: argparse.ArgumentParser) -> None:
    _with_default(
        command, "--store", "./store", "store of artifacts and runs: a folder or s3:// prefix", metavar="URI"
    )


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def _with_default(command: Any, option: str, default: str | int, about: str, **settings: Any) -> None:
    """Add an option whose help text ends with its default."""
    command.add_argument(option, default=default, help=f"{about} (default: {default})", **settings)


if __name__ == "__main__":
    sys.exit(main())
