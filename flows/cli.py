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
    run.add_argument(
        "--store", default="./store", metavar="URI", help="folder or s3:// prefix (default: ./store)"
    )
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

    profiles = _command(
        commands, "profiles", _profiles, "list the profiles that come with Trainshed", "trainshed profiles"
    )
    _json(profiles)
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


if __name__ == "__main__":
    sys.exit(main())
