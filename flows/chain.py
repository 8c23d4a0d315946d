"""Chain of training stages in one flow run, such as pretraining → SFT → DPO.

    profile 1 ─> train … export ─> gate ─> profile 2, from that export ─> train … export ─> gate ─> …

Each run executes the steps of `pretrain` under its own name, so a run that is complete in the store is cached. The next run
starts only if the evaluation meets the gate, `evaluate.gate`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.chained_runs import load_chain
from flows.final_states import final_states
from flows.hooks import HOOKS
from flows.parameters import NamePrefix, ProfileNames
from flows.pretrain import profile_name, train_profile
from flows.runner import THREADS
from flows.start_checks import RunCommand, on_devices
from tasks.chain_gate import check_gate

log = logging.getLogger(__name__)


def run_name() -> str:
    """Name of the flow run in Prefect's UI: the profiles, in order."""
    return " > ".join(map(profile_name, flow_run.parameters["profiles"]))


@flow(name="finetune", flow_run_name=run_name, task_runner=THREADS, **HOOKS)
@final_states
def chain(
    profiles: ProfileNames,
    overrides: Sequence[str] = (),
    name: NamePrefix = "",
    store: str = "./store",
    replace: bool = False,
) -> list[dict[str, Any]]:
    """Train profiles in order, each from the previous export; returns the result of each run.

    Args:
        profiles: Shipped profiles, or paths of YAML files, in order. The first may start from anything.
        overrides: Keys to override: KEY=VALUE for all, PROFILE:KEY=VALUE for one.
        name: Prefix of the runs' names, as in NAME-PROFILE; empty: the profiles' names.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        replace: If the name belongs to a run with another model, data or training, move it to NAME~N and start over.
    """
    results = []
    for number, each in enumerate(load_chain(profiles, overrides, name), 1):
        log.info("run %d of %d: %s", number, len(profiles), each.name)
        command = RunCommand(each.source, overrides, name or None, store, profiles)
        result = train_profile(on_devices(each.profile), command, replace=replace)
        check_gate(each.name, each.profile.evaluate, result["evaluation"], result["before"])
        results.append(result)
    return results
