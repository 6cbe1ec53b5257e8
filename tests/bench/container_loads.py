# SPDX-License-Identifier: Apache-2.0
"""Eight podman containers of one Debian image, which take about half a CPU together.

The image is made once, by debootstrap; PyTorch is a wheel of 200 MB, which is mounted. Needs root,
Debian 12, podman and debootstrap, and the network once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.loads import PYTHON
from bench.tools import HERE

_IMAGE = "localhost/aiflame-bench-containers:1"
_PREFIX = "aiflame-bench-"
_SUITE, _MIRROR = "bookworm", "http://deb.debian.org/debian"
_PACKAGES = (
    *("postgresql", "redis-server", "redis-tools", "gunicorn", "python3", "python3-numpy"),
    # pocl compiles kernels by the C compiler's linker.
    *("pocl-opencl-icd", "python3-pyopencl", "gcc", "libc6-dev"),
)
_TORCH = "torch==2.13.0"
# Engines raise these to what root may have, which is not allowed everywhere.
_OPTIONS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--network", "host")

# Of the host's network, as others on the host have the usual ones.
_POSTGRES_PORT, _REDIS_PORT, _GUNICORN_PORT = 25432, 26379, 28000
_AT_POSTGRES = f"-h 127.0.0.1 -p {_POSTGRES_PORT} -U postgres"
_POSTGRES_BIN = "/usr/lib/postgresql/15/bin"

# A download of 500 MB of packages, and a tar of 1.5 GB, on a busy machine.
_PATIENCE_S = 1_800.0
_READY_S = 180.0

_APP = """
import json
def app(environ, start_response):
    body = json.dumps([{"id": i, "text": "row %d" % i} for i in range(50)]).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""
_CLIENT = f"""
import http.client, time
due_s = time.monotonic()
while True:
    try:
        one = http.client.HTTPConnection("127.0.0.1", {_GUNICORN_PORT})
        one.request("GET", "/")
        one.getresponse().read()
        one.close()
    except ConnectionRefusedError:
        time.sleep(1)
    due_s = max(due_s + 1 / 100, time.monotonic() - 1)
    time.sleep(max(due_s - time.monotonic(), 0))
"""
# It rests for as long as makes 15 % of a CPU of what all its threads took.
_TRAINING = """
import time, torch
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
)
optimizer = torch.optim.Adam(model.parameters())
loss_of = torch.nn.CrossEntropyLoss()
while True:
    began_s = time.process_time()
    for _ in range(20):
        inputs, wanted = torch.randn(64, 256), torch.randint(0, 10, (64,))
        optimizer.zero_grad()
        loss_of(model(inputs), wanted).backward()
        optimizer.step()
    time.sleep((time.process_time() - began_s) * (1 / 0.15 - 1))
"""
_FILES = {"app.py": _APP, "client.py": _CLIENT, "training.py": _TRAINING}


@dataclass(frozen=True)
class _Container:
    """One of the eight, by its name and a script of its shell."""

    name: str
    script: str


_CONTAINERS = (
    _Container(
        "postgres",
        "install -d -o postgres /tmp/data && exec setpriv --reuid postgres --regid postgres"
        " --clear-groups sh -c '"
        f"{_POSTGRES_BIN}/initdb -D /tmp/data && exec {_POSTGRES_BIN}/postgres -D /tmp/data"
        f" -p {_POSTGRES_PORT} -k /tmp'",
    ),
    _Container(
        "pgbench",
        f"until {_POSTGRES_BIN}/pgbench {_AT_POSTGRES} -i -s 5 postgres; do sleep 1; done;"
        # For longer than anybody measures.
        f" exec {_POSTGRES_BIN}/pgbench {_AT_POSTGRES} -R 150 -c 4 -T 1000000 postgres",
    ),
    _Container(
        "redis", f"exec redis-server --bind 127.0.0.1 --port {_REDIS_PORT} --save '' --dir /tmp"
    ),
    _Container(
        "redis-benchmark",
        f"while :; do redis-benchmark -p {_REDIS_PORT} -t set,get -n 10000 -c 20 -q; sleep 3; done",
    ),
    _Container(
        "gunicorn", f"cd /bench && exec gunicorn -w 2 -b 127.0.0.1:{_GUNICORN_PORT} app:app"
    ),
    _Container("client", f"exec {PYTHON} /bench/client.py"),
    _Container("pytorch", f"PYTHONPATH=/torch exec {PYTHON} /bench/training.py"),
    # A second of tokens, and two to compile kernels anew.
    _Container("opencl", f"while :; do {PYTHON} /workloads/inference.py 1; sleep 15; done"),
)
NAMES = tuple(_PREFIX + each.name for each in _CONTAINERS)


def _run(*words: object, timeout_s: float = _PATIENCE_S) -> str:
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr}{done.stdout}")
    return done.stdout


def _provide_image(folder: Path) -> None:
    """Makes the image where podman has none."""
    if _run("podman", "images", "--quiet", _IMAGE):
        return
    root, archive = folder / "root", folder / "image.tar"
    if not root.exists():
        print(f"making {root}", file=sys.stderr)
        # By another name until it is whole.
        new = folder / "root.new"
        shutil.rmtree(new, ignore_errors=True)
        packages = f"--include={','.join(_PACKAGES)}"
        _run("debootstrap", "--variant=minbase", packages, _SUITE, new, _MIRROR)
        new.rename(root)
    _run("tar", "-C", root, "--one-file-system", "-cf", archive, ".")
    _run("podman", "import", "--quiet", archive, _IMAGE)
    archive.unlink()


def _provide_torch(folder: Path) -> Path:
    """Returns the packages of a virtual environment with PyTorch; makes it where there is none."""
    environment = folder / "torch"
    if not any(environment.glob("lib/python3.11/site-packages/torch-*")):
        print(f"installing {_TORCH} into {environment}", file=sys.stderr)
        # The image's interpreter is Debian 12's: 3.11.
        _run(PYTHON, "-m", "venv", environment)
        _run(environment / "bin/pip", "install", "-q", "--only-binary", ":all:", _TORCH)
    return environment / "lib/python3.11/site-packages"


def _runtime() -> str:
    """Returns the first of podman's runtimes that works here."""
    said = []
    for runtime in filter(shutil.which, ("crun", "runc")):
        command = ["podman", "--runtime", runtime, "run", "--rm", *_OPTIONS, _IMAGE, "true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_READY_S)
        if done.returncode == 0:
            return runtime
        said.append(done.stderr.strip())
    raise RuntimeError(f"podman runs no containers here: {said}")


def _remove(names: Sequence[str]) -> None:
    command = ("podman", "rm", "--force", "--ignore", "--time", 0, *names)
    try:
        _run(*command)
    except RuntimeError:  # one ended by itself meanwhile, as who asks another does
        _run(*command)


def running_names() -> set[str]:
    """Returns which of the eight run."""
    listed = _run("podman", "ps", "--format", "{{.Names}}").split()
    return {*listed} & {*NAMES}


def _is_loaded() -> bool:
    """Whether pgbench has filled its tables, which comes last."""
    done = subprocess.run(
        ["podman", "top", f"{_PREFIX}pgbench", "args"], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    # The shell has the same words behind its own.
    return any(line.startswith(f"{_POSTGRES_BIN}/pgbench") and " -R " in line for line in lines)


@contextmanager
def eight_containers(prepared: Path, folder: Path) -> Iterator[None]:
    """Runs them for as long as the block lasts, each with what it needs to begin.

    Args:
        prepared: Where the image and PyTorch are made, once.
        folder: For their programs.

    Raises:
        RuntimeError: They do not run here.
    """
    prepared.mkdir(parents=True, exist_ok=True)
    _provide_image(prepared)
    torch = _provide_torch(prepared)
    runtime = _runtime()
    folder.mkdir()
    for name, text in _FILES.items():
        (folder / name).write_text(text)
    mounts = {folder: "/bench", torch: "/torch", HERE.parent / "workloads": "/workloads"}
    volumes = [f"--volume={source.resolve()}:{at}:ro" for source, at in mounts.items()]
    _remove(NAMES)
    try:
        for each in _CONTAINERS:
            command = ["podman", "--runtime", runtime, "run", "--detach"]
            command += ["--name", _PREFIX + each.name, *volumes, *_OPTIONS, _IMAGE]
            _run(*command, "sh", "-c", each.script)
        until_s = time.monotonic() + _READY_S
        while not _is_loaded():
            if time.monotonic() > until_s:
                raise RuntimeError(_run("podman", "logs", f"{_PREFIX}pgbench"))
            time.sleep(1)
        yield
    finally:
        _remove(NAMES)
