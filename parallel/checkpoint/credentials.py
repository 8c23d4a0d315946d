"""Credentials of S3 clients that outlive them.

The AWS SDK renews the credentials of a role, an instance or `credential_process`. Those of a credentials file, such as a
session token that another process renews, it reads only once for each client.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FILES = {  # by the environment variable that names another one
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}


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
