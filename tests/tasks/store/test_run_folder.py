"""Run folders resume by identity, and are never overwritten."""


def test_prepare_returns_the_existing_folder_of_the_same_identity(store):
    folder = store.run_folder("tiny").prepare("one")
    (folder / "metrics.jsonl").write_text("{}")
    assert store.run_folder("tiny").prepare("one") == folder == store.run_folder("tiny").path
    assert (folder / "metrics.jsonl").exists()


def test_prepare_moves_runs_of_other_identities_aside(store, caplog):
    for number, identity in enumerate(("one", "two", "three")):
        (store.run_folder("tiny").prepare(identity) / "metrics.jsonl").write_text(identity)
        assert len(caplog.messages) == number
    runs = store.run_folder("tiny").path.parent
    contents = {path.name: (path / "metrics.jsonl").read_text() for path in runs.iterdir()}
    assert contents == {"tiny~1": "one", "tiny~2": "two", "tiny": "three"}
    assert "run tiny" in caplog.messages[-1]
    assert "tiny~2" in caplog.messages[-1]


def test_prepare_moves_a_folder_that_is_not_a_run_aside(store):
    folder = store.run_folder("tiny").path
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    store.run_folder("tiny").prepare("one")
    assert (folder.with_name("tiny~1") / "notes.txt").read_text() == "mine"


def test_prepare_downloads_a_run_that_another_machine_replaced(remote):
    here, there = remote("here"), remote("there")
    for machine, identity in ((here, "one"), (there, "two")):
        (machine.run_folder("tiny").prepare(identity) / "metrics.jsonl").write_text(identity)
        machine.run_folder("tiny").sync().upload()
    folder = here.run_folder("tiny").prepare("two")
    assert (folder / "metrics.jsonl").read_text() == "two"
    assert (folder.with_name("tiny~1") / "metrics.jsonl").read_text() == "one"
