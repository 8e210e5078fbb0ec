"""Folders that checkpoints are in: of this machine, or of what fsspec knows (``s3://``, ``gs://``, ``memory://``)."""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import re
import secrets
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fused_optim.backends.checksum import crc32, crc32_of_file

logger = logging.getLogger("fused_optim")

T = TypeVar("T")
TEMPORARY = ".tmp"  # what files are called that a process was writing when it was killed
_MOST_OPEN = 64  # files of a folder at a time
_ONE_READ = 1 << 20  # bytes that the system reads at once, if they are there
_NEAR = 1 << 22  # bytes that are summed up at a time, of files of this machine
_FAR = 1 << 23  # from elsewhere, where every read takes its time
PathLike = str | os.PathLike[str]


def folder_at(path: PathLike | Folder) -> Folder:
    """The folder of a path or URL.

    Raises ImportError or ValueError if fsspec cannot open it, or a Path was made of a URL.
    """
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fspath(path)
    if not isinstance(path, str) and re.match(r"[a-z][a-z0-9+.-]+:/[^/]", text):
        raise ValueError(f"{text}: a Path takes one of the slashes from a URL: pass the text itself")
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text:
        return LocalFolder(Path(text))
    from fsspec.core import url_to_fs

    system, inner = url_to_fs(text)
    return RemoteFolder(system, inner, text)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:  # links in a circle are none
            raise
        return False


def to_disk(descriptor: int) -> None:
    """``fsync``, but of file systems that cannot: CIFS and some of FUSE's refuse it, mostly of folders."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


class LocalFolder:
    """A folder of this machine, or one that is mounted. ``str()`` of it is for messages."""

    is_local = True  # folders are renamed atomically, and files are on the disk once they are synced

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def place(self) -> str:
        """The location, the same however the path was spelled."""
        return os.path.realpath(self.path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def exists(self) -> bool:
        return self.path.is_dir()

    def create(self) -> None:
        """Create it with the folders above it; nothing if it exists."""
        self.path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Names of the files and folders in it; none if it does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return [entry.name for entry in self.path.iterdir()]
        return []

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        file = self.path / name
        return file.stat().st_size if file.is_file() else None

    def sizes(self) -> dict[str, int]:
        """Sizes of all its files in bytes, by name, from one listing."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return {entry.name: entry.stat().st_size for entry in os.scandir(self.path) if _is_file(entry)}
        return {}

    def open(self, name: str, mode: str) -> BinaryIO:
        if "w" not in mode:
            return os.fdopen(self._opened(name), mode)  # type: ignore[return-value]
        file: Any = (self.path / name).open(mode, buffering=0)
        return file  # type: ignore[no-any-return]

    def _opened(self, name: str) -> int:
        """A descriptor for reading.

        Raises ValueError for links that lead outside of the folder, whose own name may be one, and Damaged for what is
        no file, such as a pipe, for whose writer one would wait for ever.
        """
        path = os.path.join(self.path, name)
        if os.path.islink(path) or os.path.dirname(name):
            real, inside = os.path.realpath(path), os.path.join(os.path.realpath(self.path), "")
            if not real.startswith(inside):
                hint = "copy the file there, or make the whole folder a link"
                raise ValueError(f"{path} is a link to {real}, outside of its folder, and is not read: {hint}")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ELOOP):  # of a socket; of links in a circle
                raise
            raise Damaged(f"{path}: expected a file, found something else") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Damaged(f"{path}: expected a file, found something else")
        return descriptor

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with self.open(name, "rb") as stream:
            stream.seek(start)
            return stream.read(-1 if length is None else length)

    def read_into(self, name: str, start: int, memory: memoryview) -> None:
        """Fill ``memory`` from byte ``start`` of a file on. Raises EOFError if the file is shorter."""
        with self._reading(name) as descriptor:
            while memory:
                count = os.preadv(descriptor, [memory], start)
                if not count:
                    raise EOFError(f"{self.path / name} ends at byte {start}")
                memory, start = memory[count:], start + count

    def crc32(self, name: str, start: int, length: int) -> int:
        """The CRC-32 of ``length`` bytes of a file. Raises EOFError if it is shorter."""
        return _crc32_by_pieces(self, name, start, length, _NEAR)

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        descriptor = self._opened(name)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def write(self, name: str, content: bytes, *, sync: bool = True) -> None:
        """Write a file atomically: a reader, or a crash, finds the old or the new content.

        ``sync=False``: a crash of the machine may lose it.
        """
        temporary = self.path / f".{name}.{secrets.token_hex(4)}{TEMPORARY}"  # others may write it at the same time
        try:
            with temporary.open("xb") as stream:
                stream.write(content)
                stream.flush()
                if sync:
                    to_disk(stream.fileno())
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file or folder, if it is there."""
        target = self.path / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def rename(self, old: str, new: str) -> None:
        (self.path / old).rename(self.path / new)

    def sync(self) -> None:
        """Flush names to the disk."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            to_disk(descriptor)
        finally:
            os.close(descriptor)

    def free(self) -> int | None:
        """Bytes that can be written; None if unknown."""
        return shutil.disk_usage(self.path).free


class _KeptOpen(LocalFolder):
    """A folder that opens each file once for all reads, of any thread, until :meth:`close`; ``_MOST_OPEN`` at most."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        with self._lock:
            if name not in self._descriptors and len(self._descriptors) < _MOST_OPEN:
                self._descriptors[name] = self._opened(name)
        if name in self._descriptors:
            yield self._descriptors[name]
        else:
            with super()._reading(name) as descriptor:
                yield descriptor

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length is None or length > _ONE_READ:
            return super().read(name, start, length)
        with self._reading(name) as descriptor:
            return os.pread(descriptor, length, start)

    def crc32(self, name: str, start: int, length: int) -> int:
        with self._reading(name) as descriptor:
            found = crc32_of_file(descriptor, start, length)
        if found is None:
            return super().crc32(name, start, length)
        if found[1] < length:
            raise EOFError(f"{self.path / name} ends at byte {start + found[1]}")
        return found[0]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


@contextmanager
def kept_open(folder: Folder) -> Iterator[Folder]:
    """The folder for many reads: opening a file takes longer than reading a small part of it.

    Folders of other kinds, derived ones too, read in ways of their own.
    """
    if type(folder) is not LocalFolder:
        yield folder
        return
    with closing(_KeptOpen(folder.path)) as opened:
        yield opened


class _OfThread(threading.local):
    """One buffer for each thread, whose pages are made once."""

    memory: memoryview = memoryview(b"")


_own = _OfThread()


def _crc32_by_pieces(folder: Folder, name: str, start: int, length: int, at_once: int) -> int:
    if len(_own.memory) < at_once:
        _own.memory = memoryview(bytearray(at_once))
    crc, end = 0, start + length
    while start < end:
        piece = _own.memory[: min(end - start, at_once)]
        folder.read_into(name, start, piece)
        crc, start = crc32(piece, crc), start + len(piece)
    return crc


_TRIES, _PAUSE = 4, 0.25  # seconds, before the second try; then three times as long each time
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError, TypeError, ValueError, EOFError)


def retried(do: Callable[[], T]) -> T:
    """Call ``do``, several times if another machine does not answer.

    Raises the last error, as an OSError; errors that a retry cannot help at once.
    """
    for number in range(_TRIES):
        try:
            return do()
        except _FINAL:
            raise
        except Exception as error:
            if number + 1 < _TRIES:
                logger.warning("tried again: %s: %s", type(error).__name__, error)
                time.sleep(_PAUSE * 3**number)
            elif isinstance(error, OSError):
                raise
            else:
                raise OSError(f"{type(error).__name__}: {error}") from error
    raise AssertionError


class RemoteFolder:
    """A folder of an fsspec file system. Object stores know no folders: one exists where something is in it."""

    is_local = False

    def __init__(self, system: Any, path: str, shown: str) -> None:
        self._system, self._path, self._shown = system, path, shown.rstrip("/")

    def __str__(self) -> str:
        return self._shown

    @property
    def name(self) -> str:
        return posixpath.basename(self._shown)

    @property
    def place(self) -> str:
        return self._shown

    def _at(self, name: str) -> str:
        return posixpath.join(self._path, name)

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._system, self._at(name), f"{self._shown}/{name}")

    def exists(self) -> bool:
        self._system.invalidate_cache()  # others write, too
        return bool(retried(lambda: self._system.isdir(self._path)))

    def create(self) -> None:
        retried(lambda: self._system.makedirs(self._path, exist_ok=True))

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            found = retried(lambda: self._system.ls(self._path, detail=False))
            return [posixpath.basename(path.rstrip("/")) for path in found]
        return []

    def size(self, name: str) -> int | None:
        self._system.invalidate_cache()  # else a listing that is late would answer for what it lacks
        with suppress(FileNotFoundError):
            info = retried(lambda: self._system.info(self._at(name)))
            return int(info["size"]) if info["type"] == "file" else None
        return None

    def sizes(self) -> dict[str, int]:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            found = retried(lambda: self._system.ls(self._path, detail=True))
            return {posixpath.basename(each["name"]): int(each["size"]) for each in found if each["type"] == "file"}
        return {}

    def open(self, name: str, mode: str) -> BinaryIO:
        stream: BinaryIO = self._system.open(self._at(name), mode)
        return stream

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""  # an empty range would be answered with the whole
        end = None if length is None else start + length
        content: bytes = retried(lambda: self._system.cat_file(self._at(name), start=start, end=end))
        return content

    def read_into(self, name: str, start: int, memory: memoryview) -> None:
        content = self.read(name, start, memory.nbytes)
        if len(content) < len(memory):
            raise EOFError(f"{self._shown}/{name} ends at byte {start + len(content)}")
        memory[:] = content

    def crc32(self, name: str, start: int, length: int) -> int:
        return _crc32_by_pieces(self, name, start, length, _FAR)

    def write(self, name: str, content: bytes, *, sync: bool = True) -> None:
        retried(lambda: self._system.pipe_file(self._at(name), content))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            retried(lambda: self._system.rm(self._at(name), recursive=True))

    def rename(self, old: str, new: str) -> None:
        self._system.mv(self._at(old), self._at(new), recursive=True)

    def sync(self) -> None:
        """Object stores answer once they have it."""

    def free(self) -> int | None:
        return None


Folder = LocalFolder | RemoteFolder


# --- errors of checkpoints that are not whole ------------------------------------------------------------------------


class Damaged(ValueError):
    """Something that a checkpoint should hold is missing, torn or changed. Another checkpoint may be whole."""


class Replaced(Damaged):
    """Another checkpoint was published in its place while it was read."""


def is_damage(error: BaseException) -> bool:
    """True if a checkpoint is not whole; False if it cannot be opened now, or is newer than the code."""
    return isinstance(error, Damaged | FileNotFoundError | EOFError)


# --- threads that read and write files -------------------------------------------------------------------------------


_WRITING = 8  # training goes on meanwhile
_READING = 16

Result = TypeVar("Result")


def threads() -> int:
    """The number of threads that write, by the cores that this process may use."""
    return min(_WRITING, len(os.sched_getaffinity(0)))


def threads_to_read() -> int:
    """The number of threads that read and compute checksums; more than write, since nothing else runs meanwhile."""
    return min(_READING, len(os.sched_getaffinity(0)))


def done_by(pool: ThreadPoolExecutor, do: Callable[[T], Result], jobs: Iterable[T]) -> list[Result]:
    """``pool.map``, without a future for each of thousands of jobs. After a job that raises, no other begins."""
    waiting = deque(enumerate(jobs))
    results: dict[int, Result] = {}

    def work() -> None:
        while waiting:
            try:
                number, job = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = do(job)
            except BaseException:
                waiting.clear()
                raise

    try:
        for worker in [pool.submit(work) for _ in range(min(threads_to_read(), len(waiting)))]:
            worker.result()
    finally:  # Ctrl+C comes here
        waiting.clear()
    return [results[number] for number in range(len(results))]
