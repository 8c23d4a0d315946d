"""The automation that evaluates completed checkpoints, on a real server."""

import time

from prefect import flow
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId

from flows.alerts.automations import EVALUATION, register_evaluation
from flows.alerts.events import emit
from tests.waiting import until

SECONDS = 120.0


@flow(name="evaluate")
def evaluate(run: str, tasks: list[str], store: str, work_dir: str) -> None:
    """Stand-in for the flow; this test has no worker that starts its runs."""


def test_a_completed_checkpoint_is_evaluated_in_its_store(prefect_server):
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(evaluate)
        deployment = client.create_deployment(flow_id, "evaluate")
        register_evaluation(["endings"])
        register_evaluation(["endings", "others"])  # updates the existing one
        time.sleep(2)  # until the server's triggers know the automation
        emit("checkpoint", "first", "complete", step=20, folder="/fsx/store/runs/first", store="/fsx/store")
        remote = {"folder": "/fsx/shared/runs/second", "store": "s3://bucket/store"}
        emit("checkpoint", "second", "complete", step=20, **remote)
        of_deployment = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))

        def both() -> list | None:
            found = client.read_flow_runs(flow_run_filter=of_deployment)
            return found if len(found) == 2 else None

        found = until(both, SECONDS, every=0.5)
        client.delete_deployment(deployment)
    Automation.read(name=EVALUATION).delete()
    tasks = ["endings", "others"]
    assert sorted((run.parameters for run in found), key=lambda parameters: parameters["run"]) == [
        {"run": "first", "tasks": tasks, "store": "/fsx/store", "work_dir": "/fsx/store"},
        {"run": "second", "tasks": tasks, "store": "s3://bucket/store", "work_dir": "/fsx/shared"},
    ]
