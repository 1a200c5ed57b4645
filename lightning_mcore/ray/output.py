# SPDX-License-Identifier: Apache-2.0
"""What rank 0 writes to stdout and stderr, shown by the process that started the run."""

import codecs
import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from ray.util.queue import Queue

_LAST_WORDS = 5.0  # seconds to wait for rank 0's output; a child that outlives it may keep the pipe open


@contextlib.contextmanager
def printed_here() -> Iterator[Queue]:
    """Print here what rank 0 sends through a queue."""
    queue = Queue(actor_options={"num_cpus": 0})

    def show() -> None:
        streams = {1: sys.stdout, 2: sys.stderr}
        decoders = {number: codecs.getincrementaldecoder("utf-8")("replace") for number in streams}
        while (item := queue.get()) is not None:
            number, data = item
            streams[number].write(decoders[number].decode(data))
            streams[number].flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        queue.put(None)
        thread.join()
        queue.shutdown()


@contextlib.contextmanager
def sent(queue: Queue) -> Iterator[None]:
    """Send what this process and its children write to stdout and stderr through a queue."""

    def send(source: int, number: int) -> None:
        while data := os.read(source, 2**16):
            queue.put((number, data))
        os.close(source)

    own, threads = {}, []
    for number in (1, 2):
        # Descriptors, not sys.stdout: C++ code and child processes write there too. "own" keeps the originals.
        own[number] = os.dup(number)
        source, sink = os.pipe()
        os.dup2(sink, number)
        os.close(sink)
        threads.append(threading.Thread(target=send, args=(source, number), daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in own.items():
            os.dup2(original, number)
            os.close(original)
        for thread in threads:
            thread.join(_LAST_WORDS)
