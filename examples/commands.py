"""What every command shares: checks before the work, locks, signals, errors in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags, logging

from vla_jax.types import INVERSES


class Interrupted(KeyboardInterrupt):
    """A signal that asked to stop.

    Attributes:
      code: what a shell expects of a process that it ended: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextlib.contextmanager
def resumable(name: str) -> Iterator[None]:
    """Ends a command that goes on where it was stopped in a line, at an error or a signal."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        sys.exit(f"{name}: {said(error)}")
    except KeyboardInterrupt as error:
        print("\nInterrupted; the same command goes on from here.")
        sys.exit(getattr(error, "code", 130))


class Signals:
    """The first SIGINT or SIGTERM, kept until somebody looks; a second one raises at once.

    Attributes:
      number: of the signal that came, 0 for none.
      waits: whether the first one is kept; False: it raises at once too.
    """

    def __init__(self) -> None:
        self.number, self.waits = 0, True

    def __call__(self) -> int:
        """The number."""
        return self.number

    def _handle(self, number: int, _: Any) -> None:
        if self.number or not self.waits:
            raise Interrupted(number)
        self.number = number


@contextlib.contextmanager
def signals() -> Iterator[Signals]:
    """Within, Ctrl-C and SIGTERM wait, unless somebody else handles or ignores them.

    Raised inside a compilation or a checkpoint, KeyboardInterrupt is lost or fatal in places.
    """
    requested = Signals()
    usual: dict[Any, Any] = {signal.SIGINT: signal.default_int_handler}
    usual[signal.SIGTERM] = signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    usual = {number: x for number, x in usual.items() if signal.getsignal(number) is x}
    for number in usual:
        signal.signal(number, requested._handle)
    try:
        yield requested
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def check_arguments(name: str, argv: Sequence[str]) -> None:
    """What a command does first: it ends if it was given more than flags.

    Without --verbosity it is to be quiet, and a file may have any name: print must not fail on it.
    """
    if len(argv) > 1:
        sys.exit(f"{name}: unexpected argument {argv[1]!r}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # orbax is talkative
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


GATES = ("decay", "beta", "inverse", "learn_lambda0")


def define_gates(of: str) -> dict[str, flags.FlagHolder[Any]]:
    """The flags named in ``GATES``: options of ``ModelConfig`` for the layers of VLA."""
    defined: dict[str, Any] = {
        "decay": flags.DEFINE_bool("decay", False, f"Whether memory and penalty decay, of {of}."),
        "beta": flags.DEFINE_bool("beta", False, f"Whether tokens have weights, of {of}."),
        "inverse": flags.DEFINE_enum(
            "inverse", "write", INVERSES, f"Where the penalty is applied, of {of}."
        ),
        "learn_lambda0": flags.DEFINE_bool(
            "learn_lambda0", False, f"Whether lambda0 is a parameter, of {of}."
        ),
    }
    for name in GATES:  # for the --help of the script
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    return defined


def said(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def directory(path: str | os.PathLike[str], flag: str = "out_dir") -> pathlib.Path:
    """A folder, made if it is not there, in which files can be made.

    Raises:
      ValueError: naming the flag and the reason, if it cannot be.
    """
    path = pathlib.Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--{flag}={path} must be a folder to write to: {said(error)}") from error
    return path.resolve()


def output(path: str | os.PathLike[str], flag: str) -> pathlib.Path:
    """A file that can be written, or made, where it is; nothing of it changes.

    Raises:
      ValueError: naming the flag and the reason, if it cannot be.
    """
    path = pathlib.Path(path)
    try:
        if path.exists():
            with open(path, "ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise ValueError(f"--{flag}={path} must be a file to write to: {said(error)}") from error
    return path


def replaceable(path: str | os.PathLike[str], flag: str) -> pathlib.Path:
    """As ``output``, for a file that is replaced: its folder must be writable too."""
    path = output(path, flag)
    directory(pathlib.Path(os.path.realpath(path)).parent, flag)
    return path


def append(path: str | os.PathLike[str], line: Any) -> None:
    """Adds a line of JSON to a file, in one write."""
    with open(path, "ab", buffering=0) as file:
        text = (json.dumps(line) + "\n").encode()
        if file.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class InUse(ValueError):
    """Another process has the folder."""


class Lock:
    """Holds a folder for this process until it is released, or the process ends in any way.

    Raises:
      InUse: if another process, or another lock of this one, holds the folder.
    """

    def __init__(self, path: pathlib.Path):
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise InUse(
                f"{path} is in use by another process: wait for it, or choose another directory"
            ) from error
        except OSError as error:  # some network file systems
            print(f"{path} cannot be locked ({said(error)}): start one process alone in it",
                  file=sys.stderr, flush=True)  # fmt: skip
        self.release = weakref.finalize(self, os.close, handle)
