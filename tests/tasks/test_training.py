"""What of a training program's log reaches the flow's."""

import logging

from tasks.training import Words


def test_rank_0_speaks_without_its_steps_and_no_more_than_a_reader_can_take(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "train.log"
    path.write_text("[rank 0] of an earlier attempt\n")
    words = Words(path)
    with path.open("a") as file:
        file.write(
            "[rank 0] resumed from step 40\n[rank 1] resumed too\n[rank 0] step 41/100  loss 5\nnot a rank's\n"
        )
        file.writelines(f"[rank 0] chatter {number}\n" for number in range(1000))
        file.write("[rank 0] UserWarning: look at this\n[rank 0] half a li")
    words.forward()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "resumed from step 40"
    assert said[-1] == "UserWarning: look at this"
    assert caplog.records[-1].levelno == logging.WARNING
    assert len(said) < 20
    assert not any("step 41" in line or "earlier" in line or "half" in line for line in said)
