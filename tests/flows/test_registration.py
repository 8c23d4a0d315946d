"""Automation that marks runs without a heartbeat as crashed, on a real server, sped up to seconds.

Its alert is sent to a webhook server on loopback.
"""

import os
import subprocess
import sys
import time
from uuid import uuid4

import pytest
from prefect import flow
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.events import emit_event
from prefect.settings import PREFECT_CLIENT_RETRY_JITTER_FACTOR
from prefect.states import Completed, Running

from flows.alerts.automations import register_alerts
from flows.alerts.events import emit
from flows.registration import register_automation
from flows.server.prefect_settings import (
    ALERTS,
    AUTOMATION,
    CLIENT_RETRIES,
    HEARTBEAT_SECONDS,
    SILENCE_SECONDS,
)

SILENCE = 20.0  # twice the shortest that Prefect accepts, for a loaded machine


ORCHESTRATOR = """
import sys, time
from prefect import flow
@flow(name="pretrain", flow_run_name=sys.argv[1])
def orchestrator():
    print("running", flush=True)
    time.sleep(600)
orchestrator()
"""


@flow
def waiting() -> None:
    """Never called: the test sends the states and heartbeats of its runs."""


def start_and_kill_an_orchestrator(server: str) -> str:
    """Kill a process during its flow run, after one heartbeat; returns the flow run's name."""
    name = uuid4().hex
    environment = {**os.environ, "PREFECT_API_URL": server, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, name], env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"running\n"
    time.sleep(1)  # heartbeats are sent by a thread
    process.kill()
    process.communicate()
    return name


def heartbeat(flow_run) -> None:
    emit_event("prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"})


@pytest.fixture
def automations(prefect_server, webhook):
    register_automation(SILENCE)
    register_alerts(webhook.block())
    yield
    for name in (AUTOMATION, *ALERTS):
        Automation.read(name=name).delete()


def test_run_without_heartbeats_crashes_with_one_alert(prefect_server, automations, webhook):
    time.sleep(2)  # until the server's triggers know the automations
    with get_client(sync_client=True) as client:
        runs = [client.create_flow_run(waiting, name=uuid4().hex, state=Running()) for _ in range(2)]
        without_server, finished = runs
        name = start_and_kill_an_orchestrator(prefect_server)
        named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        (killed,) = client.read_flow_runs(flow_run_filter=named)
        assert killed.state.is_running()
        for run in runs:
            heartbeat(run)
        client.set_flow_run_state(finished.id, Completed(name="NoNewData"))
        deadline = time.monotonic() + 60
        while not client.read_flow_run(killed.id).state.is_crashed():
            assert time.monotonic() < deadline
            time.sleep(SILENCE / 2)  # half the allowed silence: in practice, a server outage of three minutes
            heartbeat(without_server)
        assert client.read_flow_run(without_server.id).state.is_running()
        assert client.read_flow_run(finished.id).state.name == "NoNewData"
    webhook.wait_for((name, "failed"))
    emit("started", "later", "after the crash")
    webhook.wait_for(("later", "started"))
    assert webhook.kinds() == {(name, "failed"): 1, ("later", "started"): 1}
    assert "no heartbeat" in webhook.received[0]["body"]


def test_a_run_counts_as_crashed_only_after_its_client_has_given_up():
    retried = sum(2**attempt for attempt in range(1, CLIENT_RETRIES + 1))
    assert retried > 4 * 60
    assert retried * (1 + PREFECT_CLIENT_RETRY_JITTER_FACTOR.value()) + HEARTBEAT_SECONDS < SILENCE_SECONDS
