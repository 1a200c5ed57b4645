# SPDX-License-Identifier: Apache-2.0
"""Replace, remove and link a local directory in one step, so that a crash never leaves half a directory.

A directory is written in ``<parent>/.unfinished/<name>``, a hidden folder on the same disk, and renamed when its writer
calls :func:`publish`. The directory that it replaces is deleted afterwards. ``checkpoint/files.py`` calls this file,
which knows nothing about the contents.

One process, rank 0, calls these functions, while other processes write into the directory. Files, directories and
symbolic links at the path are all replaced and removed alike; a link is never followed. Only the standard library is
used.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Callable
from functools import cache

# The hidden folder holds, for a directory ``name``:
#   name              what is being written; after an exchange, what it replaced
#   name.replaced     what had the name before, on disks that cannot exchange two directories
#   name.removed      what is being deleted
#   name.mcore-lock   the mark: these entries are ours. Made first, deleted last, and locked by the writing process
# A process knows its own marks by their open descriptors, so it does not matter which path leads to the folder.
# Example: a save replaces runs/last.ckpt. begin() makes .unfinished/last.ckpt.mcore-lock and .unfinished/last.ckpt.
# publish() exchanges the two last.ckpt in one system call, then deletes the old one and the mark. A disk without that
# call needs two renames; after a crash between them, recover() renames last.ckpt.replaced back.
UNFINISHED = ".unfinished"

_REPLACED, _REMOVED, _MARK = _SUFFIXES = (".replaced", ".removed", ".mcore-lock")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_IS_THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # errors of renaming to an existing name
_HAS_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # NFS without its lock service, Lustre
_THIS_PROCESS = "this process"

_log = logging.getLogger(__name__)
_marks: dict[str, int] = {}  # descriptors of this process's marks, by directory


def unfinished(path: str) -> str:
    """Return where the directory ``path`` is written until it is complete."""
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, UNFINISHED, name)


def begin(path: str) -> str:
    """Return an empty directory to write into, without leftovers of crashed writers; what is at ``path`` stays."""
    target = unfinished(path)
    folder, name = os.path.split(target)
    if name == UNFINISHED or name.endswith(_SUFFIXES):
        raise ValueError(f"{path} ends in {name!r}, which is reserved for unfinished checkpoints; choose another name")
    _require_folder(folder)
    if (writer := _take(target)) == _THIS_PROCESS:
        raise RuntimeError(f"{path} is still being written; wait for that save, or save under another name")
    if writer is not None:
        raise RuntimeError(f"{path} is being written by {writer}; stop that process, or save under another name")
    try:
        _clear(folder)
        recover(path)
        for leftover in _entries(target):
            delete(leftover)
        os.makedirs(target)
    except BaseException:  # a Ctrl-C too: otherwise this process would hold the mark until its end
        abandon(path)
        raise
    return target


def publish(path: str) -> None:
    """Replace ``path`` by the finished directory and delete what was there; an ``OSError`` leaves it there."""
    path, source = os.path.abspath(path), unfinished(path)
    # The names inside reach the disk before the directory's own, or a power cut could leave it without files.
    sync_directory(source)
    _replace(source, path)
    _release(source)


def publish_file(path: str, name: str) -> None:
    """Replace ``path`` by one file of the finished directory, and delete the rest; errors as in :func:`publish`."""
    path, source = os.path.abspath(path), unfinished(path)
    _replace(os.path.join(source, name), path)
    _release(source)


def abandon(path: str) -> None:
    """Delete the unfinished directory; ``path`` is not touched."""
    target = unfinished(path)
    try:
        recover(path)
    except BaseException:
        _close_mark(target)  # what was moved aside is the only copy, so it is not deleted
        raise
    _release(target)


def link(path: str, target: str) -> None:
    """Replace ``path`` by a relative link to ``target``; errors as in :func:`begin`, which leave ``path`` unchanged."""
    folder, name = os.path.split(os.path.abspath(target))
    # Relative, so that the link still works after the whole folder of checkpoints has moved.
    way = os.path.relpath(os.path.realpath(folder), os.path.realpath(os.path.dirname(os.path.abspath(path))))
    directory = begin(path)
    try:
        os.symlink(os.path.normpath(os.path.join(way, name)), os.path.join(directory, name))
        publish_file(path, name)
    except BaseException:
        abandon(path)
        raise


def remove(path: str) -> None:
    """Delete a directory so that a crash leaves all of it or nothing at ``path``; if it is a link, only the link."""
    path, target = os.path.abspath(path), unfinished(path)
    recover(path)
    moves = _is_directory(path)
    if moves:
        _require_folder(os.path.dirname(target))
    is_ours = (moves or _is_ours(target)) and _take(target) is None  # otherwise it is being saved again
    try:
        if is_ours:
            delete(target + _REPLACED)  # first: half of it must not be put back once the path is free
        if moves:
            delete(target + _REMOVED)
            os.rename(path, target + _REMOVED)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if os.path.isdir(os.path.dirname(path)):
            sync_directory(os.path.dirname(path))
    finally:
        if is_ours:
            _release(target)
    if moves and not is_ours:
        _discard(target + _REMOVED)


def recover(path: str) -> bool:
    """Put back what a crash left moved aside, and return whether there was anything; all ranks may call it at once."""
    path, target = os.path.abspath(path), unfinished(path)
    if os.path.lexists(path) or not _is_ours(target) or not os.path.lexists(target + _REPLACED):
        return False
    try:
        os.rename(target + _REPLACED, path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *_IS_THERE):  # another rank was faster, or the writer has gone on
            raise
        return os.path.lexists(path)
    _log.warning("%s is restored from before the last save, which was interrupted", path)
    return True


def recover_all(folder: str) -> bool:
    """Put back everything in a folder that a crash left moved aside; return whether there was anything."""
    try:
        entries = os.listdir(os.path.join(folder, UNFINISHED))
    except (FileNotFoundError, NotADirectoryError):
        return False
    names = [entry.removesuffix(_REPLACED) for entry in entries if entry.endswith(_REPLACED)]
    # A list, not any(): every name must be recovered, not only the first.
    return bool([name for name in names if recover(os.path.join(folder, name))])


def delete(path: str) -> None:
    """Delete a file, a link or a directory with its contents, if it exists."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            if _is_directory(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def sync_directory(path: str) -> None:
    """Flush the names in a directory to the disk, if the disk supports it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def is_locked_elsewhere(descriptor: int) -> bool:
    """Lock an open file and return whether another process already holds the lock; False on disks without locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HAS_NO_LOCKS:
            return False
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return True
    return False


def _replace(source: str, path: str) -> None:
    # Between the two renames, a reader may call recover(), which puts the old directory back: try both again.
    for tries_left in (2, 1, 0):
        try:
            _put_in_place(source, path)
            break
        except OSError as error:
            if error.errno not in _IS_THERE or not tries_left:
                raise
    sync_directory(os.path.dirname(path))


def _put_in_place(source: str, path: str) -> None:
    if not os.path.lexists(path) or not (_is_directory(source) or _is_directory(path)):
        os.rename(source, path)
    elif not _exchange(source, path):
        replaced = unfinished(path) + _REPLACED
        delete(replaced)
        os.rename(path, replaced)
        try:
            os.rename(source, path)
        except BaseException:
            recover(path)
            raise


def _exchange(first: str, second: str) -> bool:
    """Exchange two names in one step; return False if the system cannot.

    Source: renameat2(2), Linux 3.15 and glibc 2.28; NFS and some FUSE disks do not support it.
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


def _require_folder(folder: str) -> None:
    """Reject a ``.unfinished`` that is a link, because what it leads to may hold other files."""
    if os.path.islink(folder):
        raise ValueError(
            f"{folder} is a link to a folder that may hold other files, and its contents would be deleted; remove the"
            " link, or save to another folder"
        )


def _clear(folder: str) -> None:
    """Put back directories that a crash left moved aside, and delete our leftovers that no process is writing."""
    for name in {entry.removesuffix(_MARK) for entry in os.listdir(folder) if entry.endswith(_MARK)}:
        target = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # the mark belongs to another user, or is not a file
            if name not in ("", os.curdir, os.pardir) and _take(target) is None:
                abandon(os.path.join(os.path.dirname(folder), name))


def _release(target: str) -> None:
    """Delete the leftovers of a directory that this process no longer writes, and the folder if it is empty."""
    if target not in _marks:
        return
    try:
        if _is_at(_marks[target], target + _MARK):  # otherwise it was deleted, and another process made one
            for leftover in _entries(target):
                _discard(leftover)
            if not any(map(os.path.lexists, _entries(target))):
                with contextlib.suppress(OSError):
                    os.unlink(target + _MARK)
    finally:
        _close_mark(target)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(target))


def _close_mark(target: str) -> None:
    """Let others write a directory, without deleting anything."""
    if (descriptor := _marks.pop(target, None)) is not None:
        os.close(descriptor)


def _entries(target: str) -> tuple[str, ...]:
    return target, target + _REPLACED, target + _REMOVED


def _discard(path: str) -> None:
    """Delete a path that is no longer needed; if that fails, only warn."""
    try:
        delete(path)
    except OSError as error:
        _log.warning("%s is no longer needed and could not be deleted: %s", path, error)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_ours(target: str) -> bool:
    """Return whether the files under these names were written by this module, in any process."""
    mark = target + _MARK
    return os.path.isfile(mark) and not os.path.islink(mark) and not os.path.islink(os.path.dirname(target))


def _take(target: str) -> str | None:
    """Create and lock the mark of ``target`` (no lock on disks without locks); return who already holds it, or None."""
    # POSIX record locks end with the process and are not inherited by forked data loaders. Closing any descriptor of
    # the file drops the lock, so a mark that is held must never be opened again.
    mark = target + _MARK
    while True:
        if target in _marks or any(_is_at(descriptor, mark) for descriptor in _marks.values()):
            return _THIS_PROCESS
        os.makedirs(os.path.dirname(target), exist_ok=True)
        is_new = not os.path.lexists(mark)
        try:
            descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue
        try:
            if is_locked_elsewhere(descriptor):
                return os.read(descriptor, 1000).decode(errors="replace") or "another process"
            if not _is_at(descriptor, mark):  # its process has deleted this mark in the meantime
                continue
            if is_new and (foreign := next(filter(os.path.lexists, _entries(target)), None)):
                os.unlink(mark)
                raise ValueError(f"{foreign} is in the way and was not written by lightning_mcore; move it elsewhere")
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            _marks[target] = descriptor  # last: an interrupt before this leaves nothing to release
            return None
        finally:
            if _marks.get(target) != descriptor:
                os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
