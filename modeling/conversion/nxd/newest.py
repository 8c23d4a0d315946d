"""The file with the name of an NxD training run's newest checkpoint."""

FILE = "newest"


def read_tag(data: bytes, path: str) -> str:
    """The name of the checkpoint, from the file's contents; `path` is for errors. Raises ValueError."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: corrupted: the name of a checkpoint is expected, and it is not UTF-8"
        ) from error
