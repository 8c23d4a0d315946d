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

from flows.cli.arguments import HelpFormatter, Parser, override
from flows.cli.exit_codes import DONE, FAILED, REJECTED
from flows.ui.console import one_line, print_stderr, redirect_to_devnull, save_traceback, waiting
from modeling import start
from modeling.conversion.choices import FORMATS, NXD_LAYOUTS, QKV_FORM_NAMES
from profiles.arguments import integer
from profiles.errors import ProfileError
from profiles.files.state_files import CorruptedState


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code; errors are printed in one line."""
    if arguments is None:
        _use_utf8()
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given or ["--help"])
    try:
        name, _, function = options.function.partition(":")
        with start.without_garbage_collection(), waiting(lambda: "loading"):
            module = importlib.import_module(f"flows.cli.{name}")
        code: int = getattr(module, function)(options)
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
    # Child processes write to files and pipes, which are read as UTF-8.
    os.environ.pop("PYTHONIOENCODING", None)


def parser() -> argparse.ArgumentParser:
    """The parser of the complete command line."""
    root = Parser(
        prog="trainshed",
        epilog="example: trainshed run tiny    (trainshed COMMAND --help for details)",
        formatter_class=HelpFormatter,
        add_help=False,
    )
    root.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # a screen has 24 lines
    version = f"trainshed {metadata.version('trainshed')}"
    root.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_training(commands)
    _add_experiments(commands)
    _add_stores(commands)
    _add_planning(commands)
    _add_tools(commands)
    for name, command in commands.choices.items():
        if name not in ("up", "tensorboard"):
            command.add("--json", "print one JSON document on standard output")
    return root


def _add_training(commands: Any) -> None:
    """Add run, chain and fork."""
    help_text = "run a profile, from the tokenizer to the exported model"
    run = _command(commands, "run", "PROFILE", help_text, "tiny --name first")
    _profile(run)
    _store(run)
    run.add("--name NAME", "the run's name (default: the profile's)")
    _update(run)
    run.add("--replace", "move a different run of this name to NAME~N")
    run.add("--from MODEL", "start from the model of run:NAME or of a folder", dest="source", default="")
    run.add("--until STEP", "end after a step, for instance graphs", default="")
    run.add("--dry-run", "only print the training job: script or manifests")
    run.set_defaults(fork=None)

    help_text = "train profiles in a chain, each from the previous export"
    chain = _command(
        commands, "chain", "PROFILE [PROFILE ...]", help_text, "tiny tiny-sft tiny-dpo", "run:chain"
    )
    chain.add("profiles PROFILE", "profiles' names or paths of YAML files", nargs="+")
    _overrides(chain, "; PROFILE:KEY.PATH=VALUE for one profile")
    _store(chain)
    chain.add("--name NAME", "prefix of the runs' names: NAME-PROFILE")
    help_text = "if these names belong to runs with another model, data or training, move them to NAME~N and start over"
    chain.add("--replace", help_text)

    help_text = "start a new run from another run's checkpoint"
    example = "tiny@600 colder --set train.learning_rate=1e-3"
    fork = _command(commands, "fork", "RUN[@STEP] NEW", help_text, example, "runs.fork:run")
    fork.add("parent RUN[@STEP]", "a run, and a checkpoint's step (default: latest)")
    fork.add("name NEW", "name of the new run")
    _overrides(fork)
    fork.add("--decay STEPS", "decay the learning rate to 0 in STEPS, and end", type=integer(1))
    _store(fork)
    _update(fork)
    fork.set_defaults(dry_run=False, until="", source="")
    fork.add("--work-dir FOLDER", "cluster.work_dir (default: the parent's)")


def _add_experiments(commands: Any) -> None:
    """Add ladder, mixture and branches, which plan or train the runs that a file describes."""
    help_text = "forecast a run's loss from smaller runs"
    action = "plan: show the rungs and their cost; run: train the missing ones, and write the forecast"
    ladder = _experiment(commands, "ladder", "training/ladder.md", help_text, action)
    ladder.add("--target", "run: also train the target, once its forecast is in the store")

    help_text = "find weights for a run's data sources from small runs"
    action = (
        "plan: show the proxies and their cost; run: train the missing ones, and propose weights; share: train small rounds of a "
        "continual series, and propose its share of replay, from a share file (docs/training/continual.md)"
    )
    mixture = _experiment(commands, "mixture", "training/mixtures.md", help_text, action, ("share",))
    mixture.add(
        "--check", "run: also train a proxy with the proposed weights, and compare it with its forecast"
    )

    help_text = "compare training lengths as branches of a single trunk"
    action = "plan: show the runs and their cost; run: train the missing ones, and compare all"
    _experiment(commands, "branches", "training/branches.md", help_text, action)


def _experiment(
    commands: Any, name: str, page: str, help_text: str, action: str, others: Sequence[str] = ()
) -> Parser:
    """Add a command that plans or runs a file.

    Args:
        page: of docs/, which describes the file's format.
        others: further actions.
    """
    actions = ("plan", "run", *others)
    shown = "|".join(actions)
    command = _command(commands, name, f"{shown} FILE", help_text, f"plan {name}.yaml", f"experiments:{name}")
    command.add(f"action {shown}", action, choices=actions)
    command.add("file FILE", f"a {name} file (docs/{page})")
    _store(command)
    return command


def _add_stores(commands: Any) -> None:
    """Add runs, evaluate, series, promote, fleet and gc."""
    help_text = "list the runs of a store, with their state and size"
    runs = _command(commands, "runs", "", help_text, "", "runs.runs:run")
    _store(runs)

    help_text = "evaluate checkpoints: held-out loss, language-model tasks"
    evaluate = _command(commands, "evaluate", "RUN[@STEP]", help_text, "tiny --task hellaswag --limit 100")
    evaluate.add("run RUN[@STEP]", "a run, and one checkpoint's step (default: all)")
    help_text = "task of lm-evaluation-harness (extra lm-eval); repeatable; default: only held-out loss"
    evaluate.add("--task NAME", help_text, dest="tasks", action="append", default=[])
    evaluate.add("--include FOLDER", "folder with your own task files", default="")
    evaluate.add("--limit N", "maximum examples per task", type=integer(1))
    evaluate.add("--follow", "wait for further checkpoints until the run ends")
    _overrides(evaluate)
    _store(evaluate)
    help_text = "local folder for run folders if the store is on S3, like cluster.work_dir"
    evaluate.add("--work-dir FOLDER", help_text, default="./store")

    help_text = "show the rounds of a continual series, with their losses"
    series = _command(commands, "series", "NAME", help_text, "tiny", "runs.series:run")
    series.add("name NAME", "the series: the name of its first run")
    _store(series)
    _output(series, "series.html")

    help_text = "make an earlier model of a series the promoted one again"
    promote = _command(commands, "promote", "NAME RUN", help_text, "tiny tiny-round-1", "runs.series:promote")
    promote.add("name NAME", "the series: the name of its first run")
    promote.add("run RUN", "a run that was promoted: a round's, or the first")
    _store(promote)

    help_text = "write a page of all runs: progress, speed, goodput, cost"
    fleet = _command(commands, "fleet", "", help_text, "--output fleet.html", "runs.runs:fleet")
    _store(fleet)
    _output(fleet, "fleet.html")

    help_text = "show or remove files of a store that no run refers to"
    collect = _command(commands, "gc", "", help_text, "", "runs.runs:gc")
    _store(collect)
    collect.add("--yes", "remove the listed files")


def _add_planning(commands: Any) -> None:
    """Add plan and up."""
    help_text = "plan a run: memory, communication, step time and cost"
    plan = _command(commands, "plan", "PROFILE", help_text, "tiny")
    _profile(plan)
    plan.add(
        "--search", "rank the topologies that fit the profile's cluster, and show why others are rejected"
    )
    help_text = "print what this profile would run again of an existing run, and why"
    plan.add("--changes RUN", help_text, default="")
    _store(plan)

    up = _command(commands, "up", "", "start a Prefect server and a worker on this machine", "")
    up.add("--port PORT", "port of the UI and the API", default=4200, type=integer(1, 65535))
    up.add("--register", "only register, with the server of PREFECT_API_URL")
    help_text = "register the deployments of all shipped profiles, not only of those that can start from here"
    up.add("--all", help_text)
    help_text = "send alerts to this Prefect notification block, such as slack-webhook/team"
    up.add("--alerts TYPE/NAME", help_text)
    help_text = (
        "evaluate each checkpoint once it is complete, and run these lm-evaluation-harness tasks on it"
    )
    up.add("--evaluate TASK", help_text, nargs="*")


def _add_tools(commands: Any) -> None:
    """Add convert, profiles, compare, tensorboard and import-config."""
    help_text = "convert a checkpoint, or compare two checkpoints"
    example = "./nxd ./model --to hf --config config.json"
    _conversion(_command(commands, "convert", "SOURCE DESTINATION", help_text, example))

    command = _command(commands, "profiles", "[WORD]", "list the shipped profiles", "llama3")
    command.add("word WORD", "list only profiles with WORD in their name", nargs="?", default="")

    help_text = "compare runs: metrics, profile differences and loss curves"
    example = "first second --output compare.html"
    compare = _command(commands, "compare", "RUN [RUN ...]", help_text, example, "runs.compare:run")
    compare.add("runs RUN", "a run's name, or the path of its folder", nargs="+")
    _store(compare)
    _output(compare, "compare.html")

    help_text = "start TensorBoard for one run, or for all runs of a store"
    tensorboard = _command(commands, "tensorboard", "[RUN]", help_text, "tiny", "runs.tensorboard:run")
    tensorboard.add("run RUN", "a run's name, or the path of its folder", nargs="?")
    _store(tensorboard)
    tensorboard.add("--port PORT", "port on loopback", default=6006, type=integer(1, 65535))

    help_text = "convert an NxD Training config to a profile"
    importer = _command(commands, "import-config", "CONFIG [OUT]", help_text, "hf_llama3_70B_config.yaml")
    importer.add("config CONFIG", "NxD Training config to convert")
    help_text = "profile to write (default: ./NAME.yaml for the config NAME_config.yaml)"
    importer.add("out OUT", help_text, nargs="?")
    help_text = "the model's config.json, if the one that CONFIG names is elsewhere"
    importer.add("--config FILE", help_text, dest="model_config")
    help_text = "plan a new topology for this hardware; keep batch and schedule"
    importer.add_argument("--hardware", choices=("trn2", "h200"), help=help_text)
    importer.add("--verbose", "list every key of the config")


def _conversion(command: Parser) -> None:
    command.add("source SOURCE", "run, checkpoint, HF or NxD folder; hub repository")
    command.add("destination DESTINATION", "folder to write, or with --verify to compare")
    command.add("--to FORMAT", f"format to write: {', '.join(FORMATS)}", choices=FORMATS)
    help_text = "average N latest checkpoints, or SOURCE and PATHs"
    command.add("--average N|PATH", help_text, action="append", default=[])
    command.add("--adapters PATH", "merge LoRA adapters of a run, NxD or PEFT folder")
    command.add("--verify", "compare both checkpoints tensor by tensor")
    command.add("--revision REVISION", "commit, tag or branch of a hub repository")
    command.add("--config PATH", "the model's config.json; required for NxD shards")
    for axis in ("tensor", "pipeline"):
        command.add(f"--{axis} N", f"{axis}-parallel degree to write", default=1, type=int)
    help_text = "KV head order of shards to read (writes only trn1)"
    command.add_argument("--nxd-layout", choices=NXD_LAYOUTS, help=help_text)
    command.add(
        "--nxd-qkv FORM", f"Q, K, V in NxD shards: {', '.join(QKV_FORM_NAMES)}", choices=QKV_FORM_NAMES
    )
    command.add("--without-mtp", "leave out modules for multi-token prediction")


def _command(
    commands: Any, name: str, operands: str, help_text: str, example: str, function: str = ""
) -> Parser:
    """Add a subcommand.

    Args:
        example: arguments of its example.
        function: that runs it, MODULE:NAME in this package; empty: `run` in the module of the same name.
    """
    command: Parser = commands.add_parser(
        name,
        help=help_text,
        usage=f"trainshed {name} [OPTIONS] {operands}".rstrip(),
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=f"example: trainshed {name} {example}".rstrip(),
        formatter_class=HelpFormatter,
    )
    command.set_defaults(function=function or f"{name.replace('-', '_')}:run")
    return command


def _profile(command: Parser) -> None:
    command.add("profile PROFILE", "a profile's name or the path of a YAML file")
    _overrides(command)


def _overrides(command: Parser, more: str = "") -> None:
    help_text = f"override a profile key, for instance train.steps=100{more}; repeatable"
    settings: dict[str, Any] = {"dest": "overrides", "type": override, "action": "append", "default": []}
    command.add_argument("-s", "--set", metavar="KEY.PATH=VALUE", help=help_text, **settings)


def _update(command: Parser) -> None:
    command.add("--update", "resolve inputs again, not from the run's lockfile")


def _store(command: Parser) -> None:
    command.add("--store URI", "store of artifacts and runs: a folder or s3:// prefix", default="./store")


def _output(command: Parser, name: str) -> None:
    command.add("--output FILE", "HTML page to write", default=name)


if __name__ == "__main__":
    sys.exit(main())
