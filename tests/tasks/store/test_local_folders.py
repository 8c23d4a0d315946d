"""Local folders of stores: each belongs to one store."""

import pytest

from profiles.errors import ProfileError
from tasks.fleet.fleet import read_fleet
from tasks.store.store import Store, open_store


def test_local_folder_of_another_store_is_neither_listed_nor_changed_nor_used(tmp_path):
    folder = tmp_path / "store"
    local = open_store(str(folder))
    (folder / "runs/first").mkdir(parents=True)
    (folder / "quarantine/kept").mkdir(parents=True)
    (folder / "quarantine/kept/file").write_text("a checkpoint")
    remote = Store("memory://local-folders/store", folder)
    assert remote.files("quarantine") == {}
    remote.remove("quarantine/kept")
    assert local.files("quarantine") == {"kept/file": 12}
    assert read_fleet(remote).runs == []
    with pytest.raises(
        ProfileError,
        match="is a store itself, as its file belongs-to says, so it cannot be the local folder of memory://local-folders/store",
    ):
        open_store("memory://local-folders/store", folder)


def test_local_folder_of_a_remote_store_belongs_to_the_first_one_that_wrote_to_it(tmp_path):
    folder = tmp_path / "store"
    open_store("memory://local-folders/typo", folder)
    open_store("memory://local-folders/right/", folder)  # nothing was written with the other one
    (folder / "runs/first").mkdir(parents=True)
    assert open_store("memory://local-folders/right", folder).has_work_dir
    for other in ("memory://local-folders/other", str(folder)):
        with pytest.raises(ProfileError, match="is the local folder of memory://local-folders/right"):
            open_store(other, folder)
    (folder / "belongs-to").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is the local folder of "):
        open_store("memory://local-folders/right", folder)


def test_credentials_in_the_location_of_a_store_are_rejected(tmp_path):
    with pytest.raises(ProfileError, match=r"^store: has credentials in a URL"):
        open_store("memory://key:secret@local-folders/store", tmp_path)
