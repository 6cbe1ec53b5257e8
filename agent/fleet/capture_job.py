# SPDX-License-Identifier: Apache-2.0
"""Makes one capture that an agent was asked for, and hands it to the client.

Started by `capture_server` as `python -m aiflame.agent.fleet.capture_job FD`, with what to do as
standard input, and the connection as FD. It ends with the agent, and when the client goes. It
is not nice: somebody waits, and a recorder that was started nice does not hurry (priority.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from aiflame.agent.allocator import map_large_blocks
from aiflame.agent.capture.schema import FACT_PREFIX
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.capture.workspace import RECORDING_KEPT
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.devices.choice import NONE
from aiflame.agent.errors import NO_SAMPLES_EXIT, AiflameError, DiskFull, EnvironmentUnfit
from aiflame.agent.fleet.capture_choice import Choice, choose, directory_of, live_processes
from aiflame.agent.fleet.capture_left import FOLDER, discard_left, discard_recordings
from aiflame.agent.fleet.capture_request import CaptureRequest, done, refusal, say
from aiflame.agent.fleet.config import AgentConfig, AgentSettings
from aiflame.agent.fleet.flight_recorder import FlightRecorder, SeenProcesses
from aiflame.agent.fleet.known_containers import kept
from aiflame.agent.fleet.labelling import is_roots, kubelet_of, label_options
from aiflame.agent.fleet.labels import Labeller, NoPods
from aiflame.agent.fleet.pods import KubeletError
from aiflame.agent.memory_file import memory_file
from aiflame.agent.model.profile import LOSSES_FACT, NS_PER_S, OF_HOST, Process
from aiflame.agent.model.window import Window
from aiflame.agent.model.window_selection import of_processes
from aiflame.agent.outfile import private_directory
from aiflame.agent.processes.targets import cgroup2_mounts
from aiflame.agent.sinks.rebuilt import capture_of_windows
from aiflame.agent.symbols.frames import clean_name

_DATABASE = "capture.aiflame"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Where memory runs out, of a unit for instance, this is what goes, and not the agent
# (OOM_SCORE_ADJ_MAX, linux/oom.h). A kubelet has all of a container go (memory.oom.group).
_OOM_SCORE = Path("/proc/self/oom_score_adj"), "1000"
# A client that reads nothing for so long has gone.
_SEND_S = 30.0
# How often it is told to end until it does.
_AGAIN_S = 0.2
# Of what a recording that fails says last.
_LAST_BYTES = 4096
# Which labels are told with a capture.
_LABEL_FACTS = ("service", "namespace", "pod", "container", "container_id", "workload", "version")


class _Job:
    """One capture.

    Args:
        request: What is asked for.
        settings: Of the agent.
        folder: For files; nobody else's.
        client: Who is told.
    """

    def __init__(
        self,
        request: CaptureRequest,
        settings: AgentSettings,
        folder: Path,
        client: socket.socket,
    ) -> None:
        self._request = request
        self._settings = settings
        self._client = client
        self._known: Labeller | None = None
        self.database = folder / _DATABASE

    def make(self) -> str:
        """Makes the capture; returns a stem for its name.

        Raises:
            AiflameError: There is none.
        """
        choice, facts = self._cut() if self._request.last_ns else self._record()
        writer = CaptureWriter(self.database, is_new=False)
        try:
            writer.put_labels(self._labeller.of(writer.processes()))
            writer.put_meta({"complete": 1, "target": choice.words, **facts, **_facts(choice)})
            writer.commit()
        finally:
            writer.close()
        return choice.stem

    def _say(self, words: str) -> None:
        self._client.send(say(words))

    def _choose(self, processes: Sequence[Process]) -> Choice:
        # Containers that end while they are recorded are known by then.
        return choose(self._request, processes, self._labeller.of(processes))

    @property
    def _labeller(self) -> Labeller:
        """Whom processes belong to, as it is when that is first asked."""
        if self._known is None:
            pods = NoPods()
            if self._settings.kubelet:
                try:
                    pods.pods = kubelet_of(self._settings).fetch()
                except KubeletError as error:
                    self._say(f"note: pods have no names: {error}")
            self._known = Labeller(
                label_options(self._settings), pods, is_roots=partial(is_roots, cgroup2_mounts())
            )
            # Containers that are gone, of which neither the kubelet nor an engine tells.
            self._known.learn(kept(self._settings.directory))
        return self._known

    def _cut(self) -> tuple[Choice, Mapping[str, str | int]]:
        """Makes it of what the agent has on disk."""
        recorded = FlightRecorder(self._settings.directory, self._request.last_ns)
        seen = SeenProcesses()
        lengths_ns = begin_ns = cpu_ns = rss_bytes = 0
        for window in recorded:
            seen.add(window)
            begin_ns = begin_ns if lengths_ns else window.start_ns
            lengths_ns += window.end_ns - window.start_ns
            cpu_ns += window.cost.all_ns
            rss_bytes = max(rss_bytes, window.cost.rss_bytes)
        numbers = [*seen.processes]
        choice = self._choose([*seen.processes.values()])
        started_ns = int(recorded.facts["started_unix_ns"])
        kept = (
            f"{_clock(started_ns + begin_ns)} to {_clock(started_ns + recorded.end_ns)} UTC,"
            f" whole windows of {recorded.stretches} stretches"
        )
        self._say(f"the last {lengths_ns / 1e9:.0f} s of {choice.words}: {kept}")
        if (self._request.last_ns - lengths_ns) > 2 * NS_PER_S:
            asked_s, keep_s = self._request.last_ns / 1e9, self._settings.keep
            self._say(
                f"note: {asked_s:g} s were asked for: no more is on disk (`keep` is {keep_s:g} s,"
                " and the agent may have been started since)"
            )
        wanted = {numbers[at] for at in choice.numbers}
        written_ns = 0

        def windows() -> Iterator[Window]:
            nonlocal written_ns
            for window in recorded:
                written_ns += window.end_ns - window.start_ns
                yield window if self._request.is_all else of_processes(window, wanted)

        try:
            capture_of_windows(
                self.database, windows(), recorded.facts, roots=seen.roots, kept=recorded.kept
            )
        except BadSegment as error:
            raise AiflameError(f"what is on disk cannot be read: {error}") from error
        if written_ns < lengths_ns:
            missing_s = (lengths_ns - written_ns) / 1e9
            self._say(
                f"note: the oldest {missing_s:.0f} s were removed meanwhile (by `keep`, or as the"
                " disk is full)"
            )
        return choice, {
            **({} if self._request.is_all else {f"{FACT_PREFIX}{LOSSES_FACT}": OF_HOST}),
            "recorder_cpu_ns": cpu_ns,
            "recorder_peak_rss_bytes": rss_bytes,
            f"{FACT_PREFIX}flight recorder": f"{kept}, of aiflame agent",
        }

    def _record(self) -> tuple[Choice, Mapping[str, str | int]]:
        """Has a recording made, by a process that may fail as it likes."""
        request, settings = self._request, self._settings
        processes = live_processes()
        choice = self._choose(processes)
        pids = ",".join(str(processes[at].pid) for at in choice.numbers)
        directory = directory_of(choice.group)
        if request.is_all or choice.group == "/":
            target = ["-a"]
        elif directory is not None:
            target = ["--cgroup", str(directory)]
        else:
            target = ["-p", pids, *([] if request.pid else ["-s"])]
        seconds = request.duration_ns / NS_PER_S
        command = [
            *(sys.executable, "-m", "aiflame.agent", "record", "-q", *target),
            *("-d", f"{seconds:.3f}s", "-F", str(request.frequency_hz), "--gpu", settings.gpu),
            *(["--gpu-duty", f"{settings.gpu_duty_percent:g}"] if settings.gpu != NONE else []),
            *([] if settings.inject else ["--no-inject"]),
            *("-o", str(self.database), "-f", "aiflame"),
        ]
        self._say(f"recording {choice.words} for {seconds:g} s at {request.frequency_hz} Hz")
        with memory_file("errors") as errors:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",  # python -m would import from the working directory first
                preexec_fn=_end_with_parent,
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                raise
            if code not in (0, NO_SAMPLES_EXIT):
                errors.seek(max(errors.tell() - _LAST_BYTES, 0))
                raise _failure(errors.read().decode(errors="replace"), code)
        return choice, {}


def _failure(said: str, code: int) -> AiflameError:
    """Returns what a recording has failed with, as its own error has it."""
    said_lines = [clean_name(line).strip() for line in said.splitlines()]
    at = max((n for n, line in enumerate(said_lines) if line.startswith("aiflame: ")), default=0)
    lines = [line for line in said_lines[at:] if line] or [f"exit status {code}"]
    error: type[AiflameError] = EnvironmentUnfit if code == 3 else AiflameError
    if lines[0].startswith("aiflame: cannot write"):  # as is said at the largest size, too
        error = DiskFull
    # Nothing of it is kept here.
    words = lines[0].removeprefix("aiflame: ").removesuffix(RECORDING_KEPT)
    return error(words, " ".join(lines[1:]) or None)


def _facts(choice: Choice) -> dict[str, str]:
    """Returns the labels of a capture of one pod or container."""
    if choice.labels is None:
        return {}
    pairs = ((name, getattr(choice.labels, name)) for name in _LABEL_FACTS)
    return {f"{FACT_PREFIX}{name.replace('_', ' ')}": value for name, value in pairs if value}


def _clock(unix_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_ns // NS_PER_S))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(_number: int, _frame: object) -> NoReturn:
    sys.exit(1)  # through all that removes files and ends children


def _watch(client: socket.socket) -> None:
    """Ends this process when the client goes, which has nothing to say any more."""
    poll = select.poll()
    poll.register(client, select.POLLIN)
    poll.poll()
    while True:  # what is raised where an object is let go, Python prints and forgets
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_AGAIN_S)


@contextlib.contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this is the end
        shutil.rmtree(folder, ignore_errors=True)
        discard_recordings(folder)


def _serve(client: socket.socket, settings: AgentSettings, request: CaptureRequest) -> None:
    """Makes a capture, and sends it or why there is none."""
    own = private_directory(settings.directory / FOLDER)
    if own is None:
        raise AiflameError(f"{settings.directory / FOLDER} cannot be made")
    discard_left(settings.directory)
    # Larger files cannot be written by this process and those that it starts, but for parsers of
    # symbols, which have limits of their own.
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = settings.capture_size
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with _own_folder(own) as folder:
        job = _Job(request, settings, folder, client)
        try:
            stem = job.make()
        except DiskFull as error:
            size_mb = settings.capture_size / 1e6
            raise DiskFull(
                f"{error}; a capture may have {size_mb:,.0f} MB",
                "ask for less, free some space, or set the agent's `capture_size`",
            ) from error
        # The client goes once it has it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with job.database.open("rb") as capture:
            socket.send_fds(client, [done(stem)], [capture.fileno()])


def main(client: socket.socket) -> None:
    """Serves one client."""
    signal.signal(signal.SIGTERM, _end)
    _end_with_parent()
    with contextlib.suppress(OSError):
        path, score = _OOM_SCORE
        path.write_text(score)
    map_large_blocks()
    client.settimeout(_SEND_S)
    job = json.load(sys.stdin)
    threading.Thread(target=_watch, args=(client,), daemon=True).start()
    request = CaptureRequest.parse(json.dumps(job["request"]).encode())
    try:
        _serve(client, AgentConfig.of_plain(job["config"]).agent, request)
    except OSError as error:
        reason = error.strerror or str(error)
        answer = refusal(f"no capture was made: {reason}")
    except AiflameError as error:
        answer = refusal(str(error), error.hint, error.exit_code)
    else:
        return
    with contextlib.suppress(OSError):
        client.send(answer)
    sys.exit(1)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
