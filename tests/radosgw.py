"""A second S3 server for tests: Ceph's radosgw on loopback.

It has a monitor, and one OSD that stores objects in memory. `python -m tests.radosgw COMMAND...` runs a command with the server's
address and credentials in its environment. Everything is kept in one temporary folder and ends with the command. Requires
Debian's ceph-mon, ceph-osd, ceph-common, radosgw and openssl.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from string import Template

from tests.ports import free_port
from tests.waiting import until

WITHOUT_CONFIGURATION = ("ceph-authtool", "monmaptool", "openssl")
PROGRAMS = (*WITHOUT_CONFIGURATION, "ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin")
PACKAGES = "radosgw ceph-mon ceph-osd ceph-common openssl"
CONFIGURATION = Template("""
[global]
fsid = $fsid
mon host = $monitor
mon data = $folder/mon
osd data = $folder/osd
rgw data = $folder/rgw
keyring = $folder/keyring
run dir = $folder
admin socket = $folder/$$name.asok
log file = $folder/$$name.log
crash dir = $folder
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd objectstore = memstore
memstore device bytes = 4294967296
mon cluster log file = $folder/cluster.log
mon allow pool size one = true
mon data avail crit = 1
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
auth allow insecure global id reclaim = false
""")


@contextmanager
def radosgw() -> Iterator[dict[str, str]]:
    """Environment variables for S3 clients of a gateway that serves during the block.

    Raises:
        RuntimeError: programs are missing, or one of Ceph's ended; the message has the end of its log.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise RuntimeError(f"{', '.join(missing)}: not installed; as root: apt-get install {PACKAGES}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainshed-radosgw-")))
        yield _start(folder, stack)


def _start(folder: Path, stack: ExitStack) -> dict[str, str]:
    """Start a monitor, an OSD and a gateway, each after the one that it needs."""
    monitor, plain, tls = free_port(), free_port(), free_port()
    fsid, key, secret = str(uuid.uuid4()), uuid.uuid4().hex, uuid.uuid4().hex
    address = f"v2:127.0.0.1:{monitor}"
    configuration, keyring, monmap = folder / "ceph.conf", folder / "keyring", folder / "monmap"
    configuration.write_text(CONFIGURATION.substitute(fsid=fsid, monitor=address, folder=folder))

    def run(program: str, *arguments: str, text: str | None = None) -> str:
        options = () if program in WITHOUT_CONFIGURATION else ("-c", str(configuration))
        done = subprocess.run([program, *options, *arguments], input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr[-2000:]}")
        return done.stdout

    def serve(program: str, *arguments: str) -> subprocess.Popen:
        with (folder / f"{program}.out").open("wb") as log:
            process = subprocess.Popen(
                [program, "-f", "-c", str(configuration), *arguments], stdout=log, stderr=subprocess.STDOUT
            )
        stack.callback(_end, process)
        return process

    for entity in ("mon.", "client.admin"):
        create = () if keyring.exists() else ("--create-keyring",)
        grants = [word for daemon in ("mon", "osd", "mgr") for word in ("--cap", daemon, "allow *")]
        run("ceph-authtool", str(keyring), *create, "--gen-key", "-n", entity, *grants)
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[{address}]", str(monmap))
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap))
    serve("ceph-mon", "-i", "a", "--public-addrv", f"[{address}]")

    (folder / "osd").mkdir()
    secret_of_osd, identity = run("ceph-authtool", "--gen-print-key").strip(), str(uuid.uuid4())
    run("ceph", "osd", "new", identity, "-i", "-", text=json.dumps({"cephx_secret": secret_of_osd}))
    run("ceph-authtool", str(keyring), "-n", "osd.0", "--add-key", secret_of_osd)
    run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
    serve("ceph-osd", "-i", "0")
    rights = ("mon", "allow rw", "osd", "allow rwx")
    run("ceph", "auth", "get-or-create", "client.rgw", *rights, "-o", f"{folder}/rgw.keyring")

    certificate = _certificate(folder, run)
    user = ("--uid", "tests", "--display-name", "tests", "--access-key", key, "--secret-key", secret)
    run("radosgw-admin", "user", "create", *user)
    frontend = f"beast endpoint=127.0.0.1:{plain} ssl_endpoint=127.0.0.1:{tls} ssl_certificate={certificate}"
    gateway = serve(
        "radosgw", "-n", "client.rgw", "--keyring", f"{folder}/rgw.keyring", "--rgw-frontends", frontend
    )
    until(lambda: _answers(gateway, f"http://127.0.0.1:{plain}", folder / "radosgw.out"))
    return {
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_CA_BUNDLE": str(certificate),
        "TRAINSHED_TEST_S3": f"http://127.0.0.1:{plain}",
        "TRAINSHED_TEST_S3_TLS": f"https://127.0.0.1:{tls}",
    }


def _certificate(folder: Path, run: Callable[..., str]) -> Path:
    """A self-signed certificate of this machine's loopback address, and its key, in one file."""
    path, key = folder / "certificate.pem", folder / "key.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(path))
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files)
    path.write_text(path.read_text() + key.read_text())
    return path


def _answers(process: subprocess.Popen, url: str, log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"radosgw: exited at start: {log.read_text()[-2000:]}")
    with suppress(urllib.error.URLError, ConnectionError):
        urllib.request.urlopen(url, timeout=5).close()
        return True
    return False


def _end(process: subprocess.Popen) -> None:
    process.kill()  # what it stores is not needed any more
    process.wait()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers, too
    with radosgw() as environment:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **environment}).returncode)


if __name__ == "__main__":
    main()
