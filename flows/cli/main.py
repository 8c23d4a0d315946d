"""The `trainshed` command. Each subcommand's code is imported when it is called, so that help and plan are quick.

Exit codes: 0 done, 1 failed, 2 the user's input was refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from flows.ui.console import drop, in_one_line, keep_traceback, say
from profiles.errors import ProfileError

FAILED, REFUSED = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        code = options.command(options)
        sys.stdout.flush()  # so that a reader who has left is noticed here
        return code
    except ProfileError as error:
        say(f"trainshed: {error}")
        return REFUSED
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:  # the reader of our output, `head` for one, has enough
        drop(sys.stdout)
        return 0
    except SystemExit as left:  # as rich makes of it
        if isinstance(left.__context__, BrokenPipeError):
            return 0
        raise
    except Exception as error:
        say(f"trainshed: {in_one_line(error)}")
        if not isinstance(error, OSError):  # else the line says it all
            say(f"the traceback: {keep_traceback()}")
        return FAILED


class Help(argparse.HelpFormatter):
    """Names in one column that is as wide as the longest, subcommands' too, which argparse counts without their indent."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        for each in self._iter_indented_subactions(action):
            length = self._current_indent + len(self._format_action_invocation(each))
            self._action_max_length = max(self._action_max_length, length)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Examples stay in their line, however long it is."""
        return text if text.startswith("example:") else super()._fill_text(text, width, indent)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="trainshed",
        description="Pretrain language models as one Prefect flow, on Trainium, GPUs and CPUs.",
        epilog="example: trainshed run tiny    (trainshed COMMAND --help says more)",
        formatter_class=Help,
    )
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    about = "run the whole pipeline of a profile"
    run = _command(commands, "run", _run, "PROFILE", about, "trainshed run tiny --name first")
    _profile(run)
    _store(run)
    run.add_argument("--name", help="the run's name (default: its profile's)")
    _json(run)

    about = "say what a run would need, or why it cannot work"
    plan = _command(commands, "plan", _plan, "PROFILE", about, "trainshed plan tiny")
    _profile(plan)
    plan.add_argument(
        "--search",
        action="store_true",
        help="the best topologies for the profile's cluster, and why others cannot be",
    )
    _json(plan)

    about = "start a Prefect server, a worker and all deployments on this machine"
    up = _command(commands, "up", _up, "", about, "trainshed up")
    _port(up, 4200, "of the UI and the API")

    about = "convert a checkpoint to another kind, or compare two"
    example = "trainshed convert ./nxd ./model --to hf --config config.json"
    _conversion(_command(commands, "convert", _convert, "SOURCE DESTINATION", about, example))

    about = "list the profiles that come with Trainshed"
    _json(_command(commands, "profiles", _profiles, "", about, "trainshed profiles"))

    about = "put runs side by side: figures, what differs in their profiles, loss curves"
    example = "trainshed compare first second --output compare.html"
    compare = _command(commands, "compare", _compare, "RUN [RUN ...]", about, example)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a run's name, or the path of its folder")
    _store(compare)
    compare.add_argument(
        "--output", default="compare.html", metavar="FILE", help="the page (default: compare.html)"
    )
    _json(compare)

    about = "start TensorBoard over a run, or over all runs of the store"
    tensorboard = _command(
        commands, "tensorboard", _tensorboard, "[RUN]", about, "trainshed tensorboard tiny"
    )
    tensorboard.add_argument("run", nargs="?", metavar="RUN", help="a run's name, or the path of its folder")
    _store(tensorboard)
    _port(tensorboard, 6006, "on loopback")

    about = "make a config of NxD Training into a profile"
    example = "trainshed import-config hf_llama3_70B_config.yaml"
    theirs = _command(commands, "import-config", _import_config, "THEIR.yaml [OUT]", about, example)
    theirs.add_argument("config", metavar="THEIR.yaml", help="a config of NxD Training")
    theirs.add_argument("out", metavar="OUT", nargs="?", help="the profile's file (default: NAME.yaml here)")
    _json(theirs)
    return root


def _command(commands, name: str, call, operands: str, about: str, example: str) -> argparse.ArgumentParser:  # noqa: ANN001
    command = commands.add_parser(
        name,
        help=about,
        usage=f"trainshed {name} [OPTIONS] {operands}".rstrip(),
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"example: {example}",
        formatter_class=Help,
    )
    command.set_defaults(command=call)
    return command


def _profile(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "profile",
        metavar="PROFILE",
        help="a profile's name (see `trainshed profiles`) or the path of a YAML file",
    )
    command.add_argument(
        *("-s", "--set"),
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override one key, for instance train.steps=100; may be repeated",
    )


def _conversion(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="Hugging Face's folder, file or repository, NxD's shards, a run's folder or its checkpoint",
    )
    command.add_argument(
        "destination", metavar="DESTINATION", help="folder to write; with --verify alone, to compare"
    )
    command.add_argument("--to", choices=("hf", "nxd", "trainshed"), help="kind of checkpoint to write")
    command.add_argument("--verify", action="store_true", help="compare the two tensor by tensor")
    command.add_argument("--revision", help="commit, tag or branch of a hub repository")
    command.add_argument("--config", metavar="PATH", help="the model's config.json, which NxD shards lack")
    for name, what in (("tensor", "tensor-parallel degree"), ("pipeline", "pipeline stages")):
        command.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"{what} to write for (default: 1)"
        )
    command.add_argument(
        "--nxd-layout",
        choices=("trn1", "trn2"),
        help="of shards whose ranks share KV heads",
    )
    command.add_argument(
        "--nxd-qkv",
        choices=("separate", "fused", "coalesced"),
        metavar="FORM",
        help="of written shards: separate, fused or coalesced (default: the last, where KV heads are not shared)",
    )
    command.add_argument(
        "--budget",
        type=_whole(1),
        default=512,
        metavar="MB",
        help="memory for tensors under way (default: 512)",
    )
    _json(command)


def _store(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--store", default="./store", metavar="URI", help="folder or s3:// prefix (default: ./store)"
    )


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def _port(command: argparse.ArgumentParser, port: int, what: str) -> None:
    command.add_argument(
        "--port", type=_whole(1, 65535), default=port, metavar="PORT", help=f"{what} (default: {port})"
    )


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def read(text: str) -> int:
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text} is no whole number {bounds}")
        return number

    return read


def _run(options: argparse.Namespace) -> int:
    from flows.cli.run import run

    return run(options.profile, options.overrides, options.name, options.store, as_json=options.json)


def _plan(options: argparse.Namespace) -> int:
    from profiles import resolve

    profile = resolve.load(options.profile, options.overrides)
    if options.search:
        from flows.cli.search import show_search

        return show_search(profile, options.profile, options.overrides, as_json=options.json)
    resolve.check(profile)  # what it refuses is refused before torch is imported
    from flows.cli.plan import show

    return show(profile, as_json=options.json)


def _convert(options: argparse.Namespace) -> int:
    from flows.cli.convert import run

    return run(options)


def _up(options: argparse.Namespace) -> int:
    from flows.cli.up import up

    return up(options.port)


def _profiles(options: argparse.Namespace) -> int:
    from flows.cli.profiles import show

    return show(as_json=options.json)


def _import_config(options: argparse.Namespace) -> int:
    from flows.cli.import_config import import_config

    return import_config(options.config, options.out, as_json=options.json)


def _compare(options: argparse.Namespace) -> int:
    from flows.cli.compare import compare

    return compare(options.runs, options.store, options.output, as_json=options.json)


def _tensorboard(options: argparse.Namespace) -> int:
    from flows.cli.tensorboard import tensorboard

    return tensorboard(options.run, options.store, options.port)


if __name__ == "__main__":
    sys.exit(main())
