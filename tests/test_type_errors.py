"""Which of mypy's errors fail `make lint`."""

from tests.type_errors import problems

REPORT = """\
benchmarks/old.py:3: error: Incompatible return value type  [return-value]
benchmarks/new.py:7: error: Missing return statement  [return]
benchmarks/new.py:7: note: See the documentation
"""


def test_only_listed_modules_may_have_errors():
    assert list(problems(REPORT, ["benchmarks/old.py"])) == REPORT.splitlines()[1:]


def test_list_only_becomes_shorter():
    listed = ["benchmarks/old.py", "benchmarks/new.py", "benchmarks/clean.py", "profiles/schema.py"]
    clean, schema = problems(REPORT, listed)
    assert clean.startswith("benchmarks/clean.py: has no type errors")
    assert schema.startswith("profiles/schema.py: is in a folder without type errors")
