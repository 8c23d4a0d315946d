"""Artifacts in Prefect's UI that cannot be rendered."""

from flows.ui.artifacts import PrefectArtifact


def test_display_error_is_logged_once_and_stops_nothing(caplog):
    page = PrefectArtifact("markdown", "run", "What this run does")
    for _ in range(2):
        page.update(lambda: 1 / 0, now=True)
    (said,) = caplog.records
    assert said.getMessage() == "artifact run: cannot be rendered: ZeroDivisionError: division by zero"
