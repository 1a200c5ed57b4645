# SPDX-License-Identifier: Apache-2.0
"""A directory that stands under its name only when it is whole, whatever moment the process dies at.

It is written in ``<parent>/.unfinished/<name>``, a hidden folder on the same disk, and renamed when its writer says
that it is whole. What stood under the name until then stays there to the last moment, and goes away afterwards. A
checkpoint of a model that no rank holds alone is such a directory; ``checkpoint/files.py`` says what lies in one.

All of these functions are called by one process, rank 0, while others write into the directory. A file on the local
disk, a directory and a symbolic link under the name are replaced and removed alike; a link is never followed.

The folder of unfinished directories holds, for a directory ``name``:

======================  ==============================================================================
``name``                what is being written; after an exchange, what it replaced, until it is deleted
``name.replaced``       what stood under the name, on disks that cannot exchange two directories at once
``name.removed``        what is being deleted
``name.mcore-lock``     says that all of these are ours: made before them, deleted after them. Locked by the
                        process that writes ``name``; a lock ends with its process
======================  ==============================================================================

Whatever has no such mark was put there by somebody else, and is left alone. This process knows what it is writing by
the marks that it holds open, under whatever name it came to the folder. Only the standard library.
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

UNFINISHED = ".unfinished"

_REPLACED, _REMOVED, _MARK = _SUFFIXES = (".replaced", ".removed", ".mcore-lock")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_IS_THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # what a rename says of a name that is taken
_THIS_PROCESS = "this process"

_log = logging.getLogger(__name__)
_marks: dict[str, int] = {}  # descriptors of the marks this process holds, by the directory being written


def unfinished(path: str) -> str:
    """Return where the directory ``path`` is written until it is whole."""
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, UNFINISHED, name)


def begin(path: str) -> str:
    """Make an empty directory to write into, and clear away what crashed writers left beside it.

    Args:
        path: Where the directory will stand. Nothing there is touched.

    Returns:
        The directory to write into.

    Raises:
        ValueError: The name is kept for this file's own use, or somebody else's files are in the way.
        RuntimeError: The directory is being written already, here or by another process.
        OSError: The disk refuses.
    """
    target = unfinished(path)
    folder, name = os.path.split(target)
    if name == UNFINISHED or name.endswith(_SUFFIXES):
        raise ValueError(f"{path} ends in {name!r}, which unfinished checkpoints use; choose another name")
    _require_folder(folder)
    if (writer := _take(target)) == _THIS_PROCESS:
        raise RuntimeError(f"{path} is still being written; wait for that save, or save under another name")
    if writer is not None:
        raise RuntimeError(f"{path} is being written by {writer}; end that, or save under another name")
    try:
        _clear(folder)
        recover(path)
        for leftover in _entries(target):
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
    _replace(source, path)
    _release(source)


def publish_file(path: str, name: str) -> None:
    """Put one file of the finished directory under the name of the directory, and delete the rest.

    Raises:
        OSError: As for :func:`publish`.
    """
    path, source = os.path.abspath(path), unfinished(path)
    _replace(os.path.join(source, name), path)
    _release(source)


def abandon(path: str) -> None:
    """Delete the unfinished directory; nothing under its name is touched."""
    recover(path)
    _release(unfinished(path))


def link(path: str, target: str) -> None:
    """Let a name lead to what stands in ``target``, in place of what stands under the name until that moment.

    Raises:
        ValueError, RuntimeError: As for :func:`begin`.
        OSError: The disk refuses; then what stood under the name stands there still.
    """
    folder, name = os.path.split(os.path.abspath(target))
    way = os.path.relpath(os.path.realpath(folder), os.path.realpath(os.path.dirname(os.path.abspath(path))))
    directory = begin(path)
    try:
        os.symlink(os.path.normpath(os.path.join(way, name)), os.path.join(directory, name))
        publish_file(path, name)
    except BaseException:
        abandon(path)
        raise


def remove(path: str) -> None:
    """Delete a directory so that a crash leaves all of it or nothing under its name; of a link, only the link.

    Raises:
        OSError: The disk refuses to move it.
        ValueError: Somebody else's files are in the way.
    """
    path, target = os.path.abspath(path), unfinished(path)
    if _is_directory(path):
        _require_folder(os.path.dirname(target))
        writer = _take(target)
        try:
            delete(target + _REMOVED)
            os.rename(path, target + _REMOVED)
        except OSError:
            if writer is None:
                _release(target)
            raise
    else:
        writer = _take(target) if _is_ours(target) else None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if os.path.isdir(os.path.dirname(path)):
        sync_directory(os.path.dirname(path))
    if writer is None:
        _release(target)
    else:  # it is being saved anew
        _discard(target + _REMOVED)


def recover(path: str) -> bool:
    """Put back what stood under a name where a crash came between moving it away and moving the new one there.

    May be called by every rank at once.

    Returns:
        Whether there was something to put back.
    """
    path, target = os.path.abspath(path), unfinished(path)
    if os.path.lexists(path) or not _is_ours(target) or not os.path.lexists(target + _REPLACED):
        return False
    try:
        os.rename(target + _REPLACED, path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *_IS_THERE):  # another rank was faster, or the writer has gone on
            raise
        return os.path.lexists(path)
    _log.warning("%s is the checkpoint before the last save, which was interrupted", path)
    return True


def recover_all(folder: str) -> bool:
    """Put back whatever a crash left moved away in a folder; return whether there was something."""
    try:
        entries = os.listdir(os.path.join(folder, UNFINISHED))
    except (FileNotFoundError, NotADirectoryError):
        return False
    names = [entry.removesuffix(_REPLACED) for entry in entries if entry.endswith(_REPLACED)]
    return bool([name for name in names if recover(os.path.join(folder, name))])


def delete(path: str) -> None:
    """Delete a file, a link or a directory with all that is in it, if there is one."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # another thread was faster
            if _is_directory(path):
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


def _replace(source: str, path: str) -> None:
    for tries_left in (2, 1, 0):
        try:
            _put_in_place(source, path)
            break
        except OSError as error:
            if error.errno not in _IS_THERE or not tries_left:  # a reader put the old one back
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


def _require_folder(folder: str) -> None:
    """Refuse a folder of unfinished directories that may be somebody else's."""
    if os.path.islink(folder):
        raise ValueError(
            f"{folder} is a link to a folder that may hold other files, and what lies in it is deleted; remove the"
            " link, or save to another folder"
        )


def _clear(folder: str) -> None:
    """Put back what a crash left moved away, and delete every leftover of ours that nobody is writing."""
    for name in {entry.removesuffix(_MARK) for entry in os.listdir(folder) if entry.endswith(_MARK)}:
        target = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # the mark is of another user, or not a file
            if name not in ("", os.curdir, os.pardir) and _take(target) is None:
                recover(os.path.join(os.path.dirname(folder), name))
                _release(target)


def _release(target: str) -> None:
    """Delete what is left of a directory that this process writes no longer, and the folder if it was the last."""
    if (descriptor := _marks.pop(target, None)) is None:
        return
    if _is_at(descriptor, target + _MARK):  # else somebody has deleted the folder, and another process made it anew
        for leftover in _entries(target):
            _discard(leftover)
        if not any(map(os.path.lexists, _entries(target))):
            with contextlib.suppress(OSError):
                os.unlink(target + _MARK)
    os.close(descriptor)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(target))


def _entries(target: str) -> tuple[str, ...]:
    return target, target + _REPLACED, target + _REMOVED


def _discard(path: str) -> None:
    """Delete what is not needed any more; that it cannot be deleted is no reason to fail."""
    try:
        delete(path)
    except OSError as error:
        _log.warning("%s is not needed any more and could not be deleted: %s", path, error)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_ours(target: str) -> bool:
    """Return whether what lies under these names was put there by this file, in whatever process."""
    mark = target + _MARK
    return os.path.isfile(mark) and not os.path.islink(mark) and not os.path.islink(os.path.dirname(target))


def _take(target: str) -> str | None:
    """Make the mark of ``target`` and lock it, where the disk has locks; return who holds it already, if anybody does.

    Source: POSIX record locks, which end with the process and which a forked data loader does not share. A process
    loses its lock when it closes any descriptor of the file, so a mark that it holds is never opened again.

    Raises:
        ValueError: Files without a mark lie under these names.
        OSError: The disk refuses.
    """
    mark = target + _MARK
    while True:
        if target in _marks or any(_is_at(descriptor, mark) for descriptor in _marks.values()):
            return _THIS_PROCESS
        os.makedirs(os.path.dirname(target), exist_ok=True)
        is_new = not os.path.lexists(mark)
        try:
            descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # another process, which needed the folder no longer, has deleted it
            continue
        if _taken(descriptor):
            writer = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            return writer or "another process"
        if _is_at(descriptor, mark):
            break
        os.close(descriptor)  # of a mark that its process has deleted meanwhile
    if is_new and (foreign := next(filter(os.path.lexists, _entries(target)), None)):
        os.unlink(mark)
        os.close(descriptor)
        raise ValueError(f"{foreign} is in the way, and lightning_mcore has not written it; move it elsewhere")
    _marks[target] = descriptor
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return None


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file is the one under a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _taken(descriptor: int) -> bool:
    """Lock a file, and return whether another process holds the lock already."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False
