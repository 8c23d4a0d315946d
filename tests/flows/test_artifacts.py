"""What Prefect's UI shows of a run, where something keeps it from being shown."""

from flows.ui.artifacts import PrefectArtifact


def test_what_cannot_be_shown_is_said_once_and_stops_nothing(caplog):
    page = PrefectArtifact("markdown", "run", "What this run does")
    for _ in range(2):
        page.update(lambda: 1 / 0, now=True)
    (said,) = caplog.records
    assert said.getMessage() == "artifact run: cannot be rendered: ZeroDivisionError: division by zero"
