"""SeaweedFS, a real server that speaks S3's API, for tests and benchmarks. Files are in a fresh folder."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

KEY, SECRET, BUCKET = "AKIDTESTS", "SECRETTESTS", "tests"
_PARTS = ("s3", "master", "volume", "filer", "admin")


def _is_free(port: int) -> bool:
    with socket.socket() as each, contextlib.suppress(OSError):
        each.bind(("127.0.0.1", port))
        return True
    return False


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections, which would take them meanwhile."""
    return list(itertools.islice(filter(_is_free, random.sample(range(10_000, 32_000), 2000)), count))


def files_at(url: str) -> Any:
    """What a server has, by another client: an s3fs.S3FileSystem."""
    import s3fs

    return s3fs.S3FileSystem(
        key=KEY, secret=SECRET, endpoint_url=url, skip_instance_cache=True, use_listings_cache=False
    )


def environment_of(url: str) -> dict[str, str]:
    """The variables by which a program finds a server."""
    return {
        "AWS_ENDPOINT_URL_S3": url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


@contextlib.contextmanager
def without_conditions(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """The environment of another server with a bucket, rclone, which ignores If-Match and
    If-None-Match, and sums. Its files are in the folder."""
    (folder / "data" / BUCKET).mkdir(parents=True)
    address = f"127.0.0.1:{_free_ports(1)[0]}"
    words = [
        os.path.join(sysconfig.get_path("scripts"), "rclone"), "serve", "s3", str(folder / "data"),
        "--addr", address, "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull,
        "--cache-dir", str(folder / "cache"), "--log-file", str(folder / "log"),
    ]  # fmt: skip
    process = subprocess.Popen(words, preexec_fn=_die_with_the_parent)
    try:
        _wait_for(process, f"http://{address}", folder / "log")
        yield environment_of(f"http://{address}")
    finally:
        process.kill()
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], url: str, log: pathlib.Path) -> None:
    for _ in range(600):
        if _answers(url) or process.poll() is not None:
            break
        time.sleep(0.05)
    assert _answers(url), log.read_text()[-2000:]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code not in (403, 404)  # no bucket yet
    except OSError:
        return False
    return True


def _die_with_the_parent() -> None:
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _make_certificate(folder: pathlib.Path) -> None:
    """key.pem, and cert.pem, which is its own authority."""
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *kind, *subject, *files]
    subprocess.run(command, check=True, capture_output=True)


class Server:
    """A server with one bucket. The context manager stops it. With `tls` it has a second port for
    HTTPS, whose certificate no authority knows but `certificate`, a file."""

    def __init__(self, tls: bool = False) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="tilestone_s3_"))
        (self._folder / "data").mkdir()
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        anonymous = {"name": "anonymous", "actions": ["List"]}  # who asks whether there is the bucket
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity, anonymous]}))
        self._ports = _free_ports(2 * len(_PARTS) + 1)
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self.tls_url = f"https://127.0.0.1:{self._ports[-1]}" if tls else None
        self.certificate = self._folder / "cert.pem"
        if tls:
            _make_certificate(self._folder)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """As environment_of."""
        return environment_of(self.url)

    def files(self) -> Any:
        """As files_at."""
        return files_at(self.url)

    def start(self) -> None:
        """Starts it over the same folder, at the same port."""
        words = [
            os.path.join(sysconfig.get_path("scripts"), "weed"), "mini",
            f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-s3.config={self._folder / 's3.json'}", f"-bucket={BUCKET}", "-admin.ui=false",
            "-webdav=false", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        ]  # fmt: skip
        ports = iter(self._ports)
        for part in _PARTS:
            words += [f"-{part}.port={next(ports)}", f"-{part}.port.grpc={next(ports)}"]
        if self.tls_url is not None:
            words += [f"-s3.port.https={self._ports[-1]}", f"-s3.cert.file={self.certificate}"]
            words.append(f"-s3.key.file={self._folder / 'key.pem'}")
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, preexec_fn=_die_with_the_parent
            )
        _wait_for(self._process, f"{self.url}/{BUCKET}", self._folder / "log")

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
