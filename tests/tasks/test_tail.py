"""Following a file that another program writes, cuts and replaces."""

from tasks.launchers.log_follower import LogFollower


def test_only_whole_new_lines_are_read(tmp_path):
    path = tmp_path / "file"
    tail = LogFollower(path)
    assert tail.lines() == []
    path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    assert tail.lines() == []
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.lines() == ["two", "three"]


def test_a_file_that_shrank_is_read_from_its_start(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    tail = LogFollower(path)
    assert [row["step"] for row in tail.rows()] == [1, 2, 3]
    path.write_text('{"step": 1}\n')
    assert [row["step"] for row in tail.rows()] == [1]


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path):
    path = tmp_path / "file"
    path.write_text("old\n")
    tail = LogFollower(path)
    tail.lines()
    other = tmp_path / "other"
    other.write_text("new, and longer\n")
    other.replace(path)
    assert tail.lines() == ["new, and longer"]


def test_a_line_that_is_no_json_object_is_named_once_and_left_out(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo{"step": 3}\n\0\0\xff\n5\n{"step": 4}\n')
    tail = LogFollower(path)
    for _ in range(2):  # as those do who draw the whole curve again and again
        assert [row["step"] for row in LogFollower(path).rows()] == [1, 4]
    assert [row["step"] for row in tail.rows()] == [1, 4]
    (said,) = caplog.records
    assert said.getMessage() == f"{path}: line 2 is no JSON object, nor are 2 after it: left out"
    with path.open("a") as file:
        file.write('{"step": 5}\ntorn\n')
    assert [row["step"] for row in tail.rows()] == [5]
    assert caplog.records[-1].getMessage() == f"{path}: line 7 is no JSON object: left out"
