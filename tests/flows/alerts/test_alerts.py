"""Every kind of alert is one notification: real Prefect server and automations, loopback webhook."""

import time
from unittest.mock import Mock

import pytest
from prefect import flow
from prefect.automations import Automation
from prefect.events.actions import DoNothing

from flows.alerts import events
from flows.alerts.automations import register_alerts, trigger_for
from flows.alerts.events import QUEUED_SECONDS, alerts, emit
from flows.server.prefect_settings import ALERT_KINDS, ALERTS
from modeling.supervision.time_account import record_attempt
from modeling.training.metrics import record_event
from profiles import resolve
from profiles.errors import ProfileError
from tasks import failures
from tasks.launchers import JobFailed
from tasks.launchers.base import NODE_FAILED
from tasks.store.run_folder import RunFolder
from tasks.store.store import Store


@pytest.fixture
def automations(prefect_server, webhook):
    """None without a block; one that an earlier version created without an action gets the block's."""
    register_alerts()
    for name in ALERTS:
        with pytest.raises(ValueError, match=name):
            Automation.read(name=name)
    earlier = {"name": ALERTS[0], "trigger": trigger_for("failed"), "actions": [DoNothing()]}
    Automation(**earlier, enabled=False).create()
    with pytest.raises(ProfileError, match="alerts = custom-webhook/none: the Prefect server has no such"):
        register_alerts("custom-webhook/none")
    register_alerts(webhook.block())
    off = Automation.read(name=ALERTS[0])
    off.enabled = False
    off.update()
    register_alerts(webhook.block())  # changes nothing, not even what the user disabled
    assert [Automation.read(name=name).enabled for name in ALERTS] == [False] + [True] * (len(ALERTS) - 1)
    off.enabled = True
    off.update()
    assert not isinstance(off.actions[0], DoNothing)
    yield
    for name in ALERTS:
        Automation.read(name=name).delete()


@flow(name="pretrain", flow_run_name="doomed")
def failing():
    raise JobFailed("out of memory")


def cause(message: str) -> str:
    """The reason that a flow records for a failed job."""
    return str(
        failures.classify(resolve.load("tiny"), JobFailed(message, "", 75 if "hung" in message else 1))
    )


def live(store: Store) -> None:
    """A run in which everything happens, as recorded by its ranks and its flow."""
    run = store.run_folder("troubled")
    run.path.mkdir(parents=True)
    profile = resolve.load("tiny", ("train.steps=20",))
    with alerts(profile, run) as alerting:
        record_attempt(run.path, "queued", time=time.time() - QUEUED_SECONDS - 1)
        alerting.update(now=True)
        record_attempt(run.path, "started", job=0)
        for step in (7, 8, 9):
            record_event(run.path, "skipped", step=step, reason="loss 99 is a spike")
        record_event(run.path, "rollback", step=9, reason="rolled back to step 5")
        for step in (20, 21):
            record_event(run.path, "not saved", step=step, reason="no space left on device")
        record_event(run.path, "corrupted checkpoint", step=9, reason="bad checksum")
        record_event(run.path, "straggler", step=20, reason="rank 3 on n2 is 2.0 times slower")
        record_event(run.path, "train retried", reason=cause("train: hung"))
        record_event(run.path, "resumed", step=20, reason="start 2, from the checkpoint of step 20")
        record_event(run.path, "train retried", reason=cause(f"Slurm ended job 7, or {NODE_FAILED}"))
        run.write("checkpoints/step_20/complete.json", b"{}")
        alerting.trained = True
    with alerts(profile, run) as alerting:  # the same run again: nothing is new
        alerting.update(now=True)
        alerting.trained = True


def test_long_time_without_a_checkpoint_is_reported_again(tmp_path, monkeypatch):
    emitted = []
    monkeypatch.setattr(events, "emit", lambda kind, run, message, **facts: emitted.append((kind, message)))
    run = Store(str(tmp_path)).run_folder("full")
    run.path.mkdir(parents=True)
    alerting = events.RunAlerts(resolve.load("tiny", ("checkpoint.every=10",)), run)
    run.write("checkpoints/step_10/complete.json", b"{}")
    alerting.update(now=True)
    for step in (20, 21, 23, 30, 31, 40):
        record_event(run.path, "not saved", step=step, reason="no space left on device")
    alerting.update(now=True)
    run.write("checkpoints/step_41/complete.json", b"{}")
    alerting.update(now=True)
    record_event(run.path, "not saved", step=50, reason="no space left on device")
    alerting.update(now=True)
    assert [message.partition(": ")[2] for kind, message in emitted if kind == "not-saved"] == [
        "step 20 could not be saved: no space left on device",
        "step 31 could not be saved: no space left on device; no checkpoint since step 10",
        "step 50 could not be saved: no space left on device",
    ]


def test_trained_run_is_finished_though_its_checkpoints_cannot_be_listed(tmp_path, monkeypatch):
    emitted, profile, run = [], resolve.load("tiny"), Store(str(tmp_path)).run_folder("unlisted")
    monkeypatch.setattr(events, "emit", lambda kind, *more, **facts: emitted.append(kind))
    monkeypatch.setattr(RunFolder, "checkpoint_steps", Mock(side_effect=OSError("cannot be listed")))
    with alerts(profile, run):  # ends with an earlier step
        pass
    assert emitted == ["started"]
    with alerts(profile, run) as alerting:
        alerting.trained = True
    assert emitted == ["started", "finished"]


def test_every_kind_is_notified_exactly_once(automations, webhook, tmp_path):
    time.sleep(2)  # until the server's triggers know the automations
    live(Store(str(tmp_path)))
    for kind in ("promoted", "not-promoted"):
        emit(kind, "troubled", "how a round was judged")
    with pytest.raises(JobFailed):
        failing()

    names = {kind: "doomed" if kind == "failed" else "troubled" for kind in ALERT_KINDS}
    webhook.wait_for(*((name, kind) for kind, name in names.items()))
    for kind in ALERT_KINDS.keys() - {"failed"}:
        emit(kind, "later", "after all others")
    webhook.wait_for(*(("later", kind) for kind in ALERT_KINDS if kind != "failed"))
    assert {kind: webhook.kinds()[name, kind] for kind, name in names.items()} == dict.fromkeys(
        ALERT_KINDS, 1
    )
    bodies = {message["subject"]: message["body"] for message in webhook.received}
    assert bodies["Trainshed: troubled spike"].startswith("troubled: step 7 skipped: loss 99 is a spike\n/")
    assert "out of memory" in bodies["Trainshed: doomed failed"]
