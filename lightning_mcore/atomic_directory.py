# SPDX-License-Identifier: Apache-2.0
"""A directory that stands under its name only when it is whole, whatever moment the process dies at.

It is written in ``<parent>/.unfinished/<name>``, a hidden folder on the same disk, and renamed when its writer says
that it is whole. What stood under the name until then stays there to the last moment, and goes away afterwards. A
checkpoint of a model that no rank holds alone is such a directory; ``checkpoint_files.py`` says what lies in one.

All of these functions are called by one process, rank 0, while others write into the directory. A file on the local
disk, a directory and a symbolic link under the name are replaced and removed alike; a link is never followed.

The folder of unfinished directories holds, for a directory ``name``:

======================  ==============================================================================
``name``                what is being written; after an exchange, what it replaced, until it is deleted
``name.replaced``       what stood under the name, on disks that cannot exchange two directories at once
``name.removed``        what is being deleted
``name.lock``           locked by the process that writes ``name``; a lock ends with its process
======================  ==============================================================================

Only the standard library.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Callable, Collection
from functools import cache

UNFINISHED = ".unfinished"

_REPLACED, _REMOVED, _LOCK = _SUFFIXES = (".replaced", ".removed", ".lock")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}

_log = logging.getLogger(__name__)
_locks: dict[str, int] = {}  # descriptors of the lock files this process holds, by the directory being written


def unfinished(path: str) -> str:
    """Return where the directory ``path`` is written until it is whole."""
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, UNFINISHED, name)


def begin(path: str, in_flight: Collection[str] = ()) -> str:
    """Make an empty directory to write into, and clear away what crashed writers left beside it.

    Args:
        path: Where the directory will stand. Nothing there is touched.
        in_flight: Names of directories that this process is still writing in the same folder; they are left alone, as
            are those of other living processes.

    Returns:
        The directory to write into.

    Raises:
        ValueError: The name is kept for this file's own use.
        RuntimeError: The directory is being written already, here or by another process.
        OSError: The disk refuses.
    """
    target = unfinished(path)
    folder, name = os.path.split(target)
    if name == UNFINISHED or name.endswith(_SUFFIXES):
        raise ValueError(f"{path} ends in {name!r}, which unfinished checkpoints use; choose another name")
    if name in in_flight:
        raise RuntimeError(f"{path} is still being written; wait for that save, or save under another name")
    os.makedirs(folder, exist_ok=True)
    if writer := _lock(target):
        raise RuntimeError(f"{path} is being written by {writer}; end that, or save under another name")
    try:
        _clear(folder, {*in_flight, name})
        recover(path)
        for leftover in (target, target + _REPLACED, target + _REMOVED):
            delete(leftover)
        os.makedirs(target)
    except OSError:
        _release(target)
        raise
    return target


def publish(path: str) -> None:
    """Put the finished directory under its name, in place of what may stand there, and delete that.

    Raises:
        OSError: The disk refuses; then what stood under the name stands there still.
    """
    path, source = os.path.abspath(path), unfinished(path)
    sync_directory(source)
    for tries_left in (2, 1, 0):
        try:
            _put_in_place(source, path)
            break
        except OSError as error:
            taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # a reader put the old one back
            if not taken or not tries_left:
                raise
    sync_directory(os.path.dirname(path))
    _release(source)


def abandon(path: str) -> None:
    """Delete the unfinished directory; nothing under its name is touched."""
    recover(path)
    _release(unfinished(path))


def link(path: str, target: str) -> None:
    """Let a name lead to what stands in ``target``, in place of what stands under the name until that moment.

    Raises:
        RuntimeError: Another process is writing under the name.
        OSError: The disk refuses; then what stood under the name stands there still.
    """
    path, source = os.path.abspath(path), unfinished(path)
    folder, name = os.path.split(os.path.abspath(target))
    way = os.path.relpath(os.path.realpath(folder), os.path.realpath(os.path.dirname(path)))
    os.makedirs(os.path.dirname(source), exist_ok=True)
    if writer := _lock(source):
        raise RuntimeError(f"{path} is being written by {writer}; end that, or save under another name")
    try:
        delete(source)
        os.symlink(os.path.normpath(os.path.join(way, name)), source)
        if os.path.isdir(path) and not os.path.islink(path):
            _put_in_place(source, path)
        else:
            os.replace(source, path)
        sync_directory(os.path.dirname(path))
    finally:
        _release(source)


def remove(path: str) -> None:
    """Delete a directory so that a crash leaves all of it or nothing under its name; of a link, only the link.

    Raises:
        OSError: The disk refuses to move it.
    """
    path, aside = os.path.abspath(path), unfinished(path) + _REMOVED
    if os.path.isdir(path) and not os.path.islink(path):
        os.makedirs(os.path.dirname(aside), exist_ok=True)
        delete(aside)
        os.rename(path, aside)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if os.path.isdir(os.path.dirname(path)):
        sync_directory(os.path.dirname(path))
    for leftover in (aside, unfinished(path) + _REPLACED):
        _discard(leftover)
    _remove_if_empty(os.path.dirname(aside))


def recover(path: str) -> bool:
    """Put back what stood under a name where a crash came between moving it away and moving the new one there.

    May be called by every rank at once.

    Returns:
        Whether there was something to put back.
    """
    path, replaced = os.path.abspath(path), unfinished(path) + _REPLACED
    if os.path.lexists(path) or not os.path.lexists(replaced):
        return False
    with contextlib.suppress(FileNotFoundError):  # another rank was faster
        os.rename(replaced, path)
        _log.warning("%s is the checkpoint before the last save, which was interrupted", path)
    return True


def delete(path: str) -> None:
    """Delete a file, a link or a directory with all that is in it, if there is one."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # another thread was faster
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def sync_directory(path: str) -> None:
    """Wait until the names in a directory are on the disk, where the disk can tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):  # some network disks cannot
            raise
    finally:
        os.close(descriptor)


def _put_in_place(source: str, path: str) -> None:
    if not os.path.lexists(path):
        os.rename(source, path)
    elif not _exchange(source, path):
        delete(source + _REPLACED)
        os.rename(path, source + _REPLACED)
        try:
            os.rename(source, path)
        except BaseException:
            recover(path)
            raise


def _exchange(first: str, second: str) -> bool:
    """Let two names change places at once; return whether the system can.

    Source: renameat2(2), Linux 3.15 and glibc 2.28; NFS and some FUSE disks refuse it.
    """
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), first, None, second)


@cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    return lambda *arguments: int(function(*arguments))


def _clear(folder: str, in_flight: set[str]) -> None:
    """Put back what a crash left moved away, and delete every leftover that nobody is writing."""
    entries = os.listdir(folder)
    for name in {_owner(entry) for entry in entries} - in_flight:
        target = os.path.join(folder, name)
        if _other_writer(target):
            continue
        recover(os.path.join(os.path.dirname(folder), name))
        _unlock(target)
        for leftover in (target, *(target + suffix for suffix in _SUFFIXES)):
            _discard(leftover)


def _owner(entry: str) -> str:
    """Return the name of the directory that an entry of the folder belongs to."""
    return next((entry.removesuffix(suffix) for suffix in _SUFFIXES if entry.endswith(suffix)), entry)


def _release(target: str) -> None:
    """Delete what is left of a directory that is written no longer, and the folder if it was the last."""
    _discard(target)
    _discard(target + _REPLACED)
    _unlock(target)
    _remove_if_empty(os.path.dirname(target))


def _discard(path: str) -> None:
    """Delete what is not needed any more; that it cannot be deleted is no reason to fail."""
    try:
        delete(path)
    except OSError as error:
        _log.warning("%s is not needed any more and could not be deleted: %s", path, error)


def _remove_if_empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _lock(target: str) -> str | None:
    """Lock ``target`` for this process, where the disk has locks; return which other process holds it, if one does.

    Source: POSIX record locks, which end with the process and which a forked data loader does not share.
    """
    _unlock(target)
    if writer := _other_writer(target):
        return writer
    try:
        descriptor = os.open(target + _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None
    _locks[target] = descriptor
    if _taken(descriptor):
        os.close(_locks.pop(target))
        return "another process"
    with contextlib.suppress(OSError):
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return None


def _unlock(target: str) -> None:
    if (descriptor := _locks.pop(target, None)) is not None:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(target + _LOCK)


def _other_writer(target: str) -> str | None:
    """Return which living process, other than this one, writes ``target``; None where nobody does."""
    try:
        descriptor = os.open(target + _LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        return os.read(descriptor, 1000).decode(errors="replace") if _taken(descriptor) else None
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    """Lock a file, and return whether another process holds the lock already."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False
