"""`compile.enabled: auto` is decided once per run, and recorded in its folder."""

from types import SimpleNamespace

from flows.run_setup import settle_compilation
from modeling.models.build import defers_weight_gradients
from profiles import resolve
from tasks.step import Context
from tasks.steps.graphs import GraphsStep
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.runs import recorded_compilation
from tasks.store.store import Store


def test_decision_is_recorded_and_kept_when_the_run_resumes(tmp_path):
    store = Store(str(tmp_path))
    for eager, given in ((True, "auto"), (False, "auto"), (True, "true")):
        profile = resolve.load("tiny", [f"compile.enabled={given}"], f"run-{eager}-{given}")
        assert recorded_compilation(store, profile) == profile
        runner = SimpleNamespace(context=Context(profile, store))
        store.run_folder(profile.name).prepare("identity")
        settle_compilation(
            runner, Artifact(ArtifactId("graphs", "key"), summary={"eager": True} if eager else {})
        )
        assert runner.context.profile.compile.enabled is not eager
        again = recorded_compilation(store, profile)
        assert again.compile.enabled is (not eager if given == "auto" else True)
        # The user did not turn it off.
        reason = "training runs in eager mode" if eager and given == "auto" else None
        assert GraphsStep().skip_reason(again) == reason


def test_undecided_compilation_is_planned_as_compiled():
    pipeline = ("parallel.pipeline=2", "parallel.tensor=1", "parallel.schedule=zero_bubble")
    for given in ("auto", "true", "false"):
        profile = resolve.load("tiny", [*pipeline, "train.recompute=none", f"compile.enabled={given}"])
        assert defers_weight_gradients(profile) is (given != "false")
        assert (GraphsStep().skip_reason(profile) is None) is (given != "false")
