"""S3: differences between servers, such as answers without a message; how credentials are renewed.

The AWS SDK renews the credentials of a role, an instance or `credential_process`. Those of a credentials file, such as a
session token that another process renews, it reads only once for each client.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

NOT_SUPPORTED = (400, 411, 501)  # HTTP status codes of servers that do not know a header, or require another
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "az"}  # they list everything below a prefix at once
PARALLEL_DELETES = 16
OBJECTS = ("GetObject", "HeadObject")  # operations whose answers have the type of an object
PAGE = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
HTTP_ERROR = 300  # status code from which on an answer is an error or a redirection
FILES = {  # by the environment variable that names another one
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}

log = logging.getLogger(__name__)


def is_not_supported(error: BaseException) -> bool:
    """Whether an S3 server rejected the form of a request, rather than what it asks for."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and (
        response.get("ResponseMetadata", {}).get("HTTPStatusCode") in NOT_SUPPORTED
    )


@contextmanager
def explained() -> Iterator[None]:
    """Give an OSError of the block its cause's message if it has none: Ceph's answers have a code only.

    Raises it also instead of the TypeError of s3fs, which looks for AWS's words in the message that a file has changed.
    """
    try:
        yield
    except (OSError, TypeError) as raised:
        error = raised.__context__ if isinstance(raised, TypeError) else raised
        if not isinstance(error, OSError) or (reason := unexplained(error)) is None:
            raise
        error.args, error.strerror = (reason,), reason
        raise error from error.__cause__


def unexplained(error: BaseException) -> str | None:
    """The message of an OSError's cause, if it has none itself."""
    lacks = isinstance(error, OSError) and error.args[-1:] == (None,)
    return str(error.__cause__) if lacks and error.__cause__ is not None else None


def guard_answers(files: AbstractFileSystem) -> None:
    """Let an S3 client raise ConnectionError for a web page in place of an answer.

    Otherwise it reads the page as an empty listing, or as the success of a write, a copy or a deletion.
    """
    if "s3" not in files.protocol or getattr(files, "guarded_client", None) is (client := files.s3):
        return
    client.meta.events.register("after-call.s3", _reject_page)
    files.guarded_client = client


async def _reject_page(http_response: Any, model: Any, **_: Any) -> None:
    """Raise ConnectionError for a web page in place of an answer; callers reject one for an object."""
    headers, listing = http_response.headers, model.name.startswith("List")
    is_error = http_response.status_code >= HTTP_ERROR and not listing
    if is_error or not headers.get("content-type", "").startswith("text/html"):
        return
    if listing:
        is_page = True
    elif model.name in OBJECTS:  # they may be pages, such as a report
        is_page = "etag" not in headers
    else:  # servers may give this type to an empty answer
        is_page = PAGE.match(await http_response.content) is not None
    if is_page:
        what = "a listing" if listing else f"the answer to {model.name}"
        reason = f"a web page was answered in place of {what}, perhaps by a captive portal or a proxy; check the network"
        raise ConnectionError(f"{http_response.url}: {reason}")


def is_object_store(files: AbstractFileSystem) -> bool:
    """Whether a file system has no folders, only names with a prefix."""
    names = files.protocol
    return not OBJECT_STORES.isdisjoint([names] if isinstance(names, str) else names)


def find(files: AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """fsspec's description of each file below a folder or prefix, by path; empty if it does not exist.

    Raises OSError if a folder cannot be listed. Of a file system with folders, fsspec's `find` leaves out what is in it.
    """
    if is_object_store(files):
        found: Any = files.find(root, detail=True)
        # adlfs returns a list for a single file.
        return found if isinstance(found, dict) else {path: files.info(path) for path in found}
    found, folders = {}, [root]
    while folders:
        folder = folders.pop()
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in files.ls(folder, detail=True):
                if entry["type"] != "directory":
                    found[entry["name"]] = entry
                elif entry["name"].rstrip("/") != folder:
                    folders.append(entry["name"].rstrip("/"))
    return dict(sorted(found.items()))


def make_folder(files: AbstractFileSystem, path: str) -> None:
    """Create a folder and its parents, unless it exists; object stores need none.

    There, fsspec would ask whether the bucket exists, and create one if it cannot tell.
    """
    if not is_object_store(files):
        files.makedirs(path, exist_ok=True)


def delete(files: AbstractFileSystem, target: str | Sequence[str]) -> None:
    """Delete a folder, or objects, in requests of many, or one by one if the server rejects those.

    Newer AWS SDKs send a CRC with such a request, where S3 once required Content-MD5. Some servers still do, or do not support
    such requests at all.
    """
    try:
        with explained():
            files.rm(target, recursive=isinstance(target, str))
    except OSError as error:
        if not is_not_supported(error):
            raise
        paths = [*find(files, target)] if isinstance(target, str) else target
        log.info("%s; deleting %d objects one by one", error, len(paths))
        with ThreadPoolExecutor(PARALLEL_DELETES) as pool:
            list(pool.map(files.rm_file, paths))


def renew_credentials(filesystem: Any) -> None:
    """Reconnect an S3 filesystem if a credentials file has changed; costs no request."""
    if "s3" not in filesystem.protocol:
        return
    stamps = [
        _stamp(Path(os.path.expanduser(os.environ.get(name) or default))) for name, default in FILES.items()
    ]
    if getattr(filesystem, "credentials_stamps", stamps) != stamps:
        filesystem.connect(refresh=True)
    filesystem.credentials_stamps = stamps


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What differs after a file was replaced or changed; None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
