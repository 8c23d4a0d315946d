"""What Prefect's UI shows of a run, where something keeps it from being shown."""

from flows.ui.artifacts import Shown


def test_what_cannot_be_shown_is_said_once_and_stops_nothing(caplog):
    page = Shown("markdown", "run", "What this run does")
    for _ in range(2):
        page.show(lambda: 1 / 0, now=True)
    (said,) = caplog.records
    assert said.getMessage() == "the artifact run cannot be shown: ZeroDivisionError: division by zero"
