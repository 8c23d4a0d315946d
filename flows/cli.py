"""The `trainshed` command. Each subcommand's code is imported when it is called, so that help and plan are quick.

Exit codes: 0 done, 1 failed, 2 the user's input was refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flows.console import say
from profiles.errors import ProfileError

REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except ProfileError as error:
        say(f"trainshed: {error}")
        return REFUSED
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:  # the reader of our output, `head` for one, has enough
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="trainshed",
        description="Pretrain language models as one Prefect flow, on Trainium, GPUs and CPUs.",
    )
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = _command(
        commands, "run", _run, "run the whole pipeline of a profile", "trainshed run tiny --name first"
    )
    _profile(run)
    _store(run)
    run.add_argument("--name", help="the run's name (default: its profile's)")
    _json(run)

    plan = _command(
        commands, "plan", _plan, "say what a run would need, or why it cannot work", "trainshed plan tiny"
    )
    _profile(plan)
    _json(plan)

    up = _command(
        commands,
        "up",
        _up,
        "start a Prefect server, a worker and all deployments on this machine",
        "trainshed up",
    )
    up.add_argument("--port", type=int, default=4200, help="of the UI and the API (default: 4200)")

    convert = _command(
        commands,
        "convert",
        _convert,
        "convert a checkpoint to another kind, or compare two",
        "trainshed convert ./nxd-shards ./model --to hf --config ./config.json --nxd-layout trn1",
    )
    _conversion(convert)

    profiles = _command(
        commands, "profiles", _profiles, "list the profiles that come with Trainshed", "trainshed profiles"
    )
    _json(profiles)

    compare = _command(
        commands,
        "compare",
        _compare,
        "put runs side by side: figures, what differs in their profiles, loss curves",
        "trainshed compare first second --output compare.html",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a run's name, or the path of its folder")
    _store(compare)
    compare.add_argument(
        "--output", default="compare.html", metavar="FILE", help="the page (default: compare.html)"
    )
    _json(compare)

    tensorboard = _command(
        commands,
        "tensorboard",
        _tensorboard,
        "start TensorBoard over a run, or over all runs of the store",
        "trainshed tensorboard tiny",
    )
    tensorboard.add_argument("run", nargs="?", metavar="RUN", help="a run's name, or the path of its folder")
    _store(tensorboard)
    tensorboard.add_argument("--port", type=int, default=6006, help="on loopback (default: 6006)")
    return root


def _command(commands, name: str, call, about: str, example: str) -> argparse.ArgumentParser:  # noqa: ANN001
    command = commands.add_parser(
        name, help=about, description=f"{about.capitalize()}.", epilog=f"example: {example}"
    )
    command.set_defaults(command=call)
    return command


def _profile(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "profile", help="a profile's name (see `trainshed profiles`) or the path of a YAML file"
    )
    command.add_argument(
        *("--set", "-s"),
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override one key, for instance train.steps=100; may be repeated",
    )


def _conversion(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source",
        help="a checkpoint: Hugging Face (folder, file, hub repository, s3://), NxD shards, Trainshed, or a run's folder",
    )
    command.add_argument("destination", help="the folder to write; with --verify alone, the other checkpoint")
    command.add_argument("--to", choices=("hf", "nxd", "trainshed"), help="kind of checkpoint to write")
    command.add_argument(
        "--verify", action="store_true", help="compare source and destination tensor by tensor"
    )
    command.add_argument("--revision", help="commit, tag or branch of a hub repository")
    command.add_argument(
        "--config", metavar="FILE_OR_FOLDER", help="the model's config.json, which NxD shards lack"
    )
    for name, what in (("tensor", "tensor-parallel degree"), ("pipeline", "pipeline stages")):
        command.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"{what} to write for (default: 1)"
        )
    command.add_argument(
        "--nxd-layout",
        choices=("trn1", "trn2"),
        help="of NxD shards; must be said where ranks share KV heads",
    )
    command.add_argument(
        "--nxd-qkv",
        choices=("separate", "fused", "coalesced"),
        help="how Q, K and V lie in written NxD shards (default: coalesced where each query head has its KV head)",
    )
    command.add_argument(
        "--budget", type=int, default=512, metavar="MB", help="memory for tensors under way (default: 512)"
    )
    _json(command)


def _store(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--store", default="./store", metavar="URI", help="folder or s3:// prefix (default: ./store)"
    )


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def _run(options: argparse.Namespace) -> int:
    from flows.run import run

    return run(options.profile, options.overrides, options.name, options.store, as_json=options.json)


def _plan(options: argparse.Namespace) -> int:
    from profiles import resolve

    profile = resolve.load(options.profile, options.overrides)
    resolve.check(profile)  # what it refuses is refused before torch is imported
    from flows.plan import show

    return show(profile, as_json=options.json)


def _convert(options: argparse.Namespace) -> int:
    from flows.convert import run

    return run(options)


def _up(options: argparse.Namespace) -> int:
    from flows.up import up

    return up(options.port)


def _profiles(options: argparse.Namespace) -> int:
    import json

    from profiles import resolve

    described = {name: resolve.load(name).description for name in resolve.names()}
    if options.json:
        print(json.dumps(described, indent=1))
    else:
        width = max(map(len, described))
        print("\n".join(f"{name:<{width}}  {description}" for name, description in described.items()))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from flows.compare import compare

    return compare(options.runs, options.store, options.output, as_json=options.json)


def _tensorboard(options: argparse.Namespace) -> int:
    from flows.tensorboard import tensorboard

    return tensorboard(options.run, options.store, options.port)


if __name__ == "__main__":
    sys.exit(main())
