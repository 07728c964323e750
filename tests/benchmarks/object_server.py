"""The object server that remote checkpoints are measured against: how fast it is, how true its cap, and obstore on it.

    python tests/benchmarks/object_server.py [--bytes 1073741824]

`sockets` receives into one buffer a thread and does nothing else: what the server can do. `stream` copies the pieces
that obstore hands out into place, `bytes` copies a whole range. Memory is the peak of this process's resident memory
over what it was before.
"""

from __future__ import annotations

import argparse
import http.client
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import obstore
from obstore.store import HTTPStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.object_server import ObjectServer

MIB = 1 << 20
RANGES = (1, 4, 8, 32)  # MiB
THREADS = (1, 4, 16)
CAP = 200e6  # bytes/s
NAME = "weights.bin"
Read = Callable[[int, int, memoryview], None]


def sockets(server: ObjectServer) -> Read:
    host, connections = server.origin().removeprefix("http://"), threading.local()

    def read(start: int, stop: int, into: memoryview) -> None:
        if not hasattr(connections, "own"):
            connections.own = http.client.HTTPConnection(host)
        connections.own.request("GET", f"/http/{NAME}", headers={"Range": f"bytes={start}-{stop - 1}"})
        answer, at = connections.own.getresponse(), 0
        while at < stop - start:
            at += answer.readinto(into[at:])
        answer.read()

    return read


def by_obstore(server: ObjectServer, how: str) -> Read:
    store = HTTPStore.from_url(f"{server.origin()}/http", client_options={"allow_http": True})
    e_tag = obstore.head(store, NAME)["e_tag"]

    def read(start: int, stop: int, into: memoryview) -> None:
        found, at = obstore.get(store, NAME, options={"range": (start, stop), "if_match": e_tag}), 0
        for piece in [found.bytes()] if how == "bytes" else found.stream(min_chunk_size=MIB):
            into[at : at + len(piece)] = piece
            at += len(piece)
        assert at == stop - start

    return read


def timed(read: Read, size: int, nbytes: int, threads: int) -> tuple[float, float]:
    """Bytes a second and MiB of memory for `size` bytes in ranges of `nbytes`."""
    starts: queue.SimpleQueue[int] = queue.SimpleQueue()
    for start in range(0, size, nbytes):
        starts.put(start)

    def work(into: memoryview) -> None:
        while not starts.empty():
            try:
                start = starts.get_nowait()
            except queue.Empty:
                return
            read(start, min(start + nbytes, size), into)

    workers = [threading.Thread(target=work, args=(memoryview(bytearray(nbytes)),)) for _ in range(threads)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, began = _memory("VmRSS"), time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return size / (time.perf_counter() - began), _memory("VmHWM") - before


def _memory(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=1 << 30)
    size = parser.parse_args().bytes
    with tempfile.TemporaryDirectory() as root, ObjectServer(Path(root)) as server:
        with (Path(root) / NAME).open("wb") as file:
            for _ in range(0, size, 16 * MIB):
                file.write(bytes(16 * MIB))
            file.truncate(size)
        ways = {
            "sockets": sockets(server),
            "stream": by_obstore(server, "stream"),
            "bytes": by_obstore(server, "bytes"),
        }
        for name, read in ways.items():
            print(f"{name}: GB/s (MiB)   " + "".join(f"{nbytes:>8} MiB  " for nbytes in RANGES))
            for threads in THREADS:
                found = [timed(read, size, nbytes * MIB, threads) for nbytes in RANGES]
                row = "".join(f"{speed / 1e9:7.2f} ({mib:4.0f})" for speed, mib in found)
                print(f"  {threads:2} threads          {row}", flush=True)
        server.configure(bandwidth=CAP)
        for threads in THREADS:
            speed, _ = timed(ways["stream"], min(size, 400_000_000), 8 * MIB, threads)
            print(f"cap of {CAP / 1e6:.0f} MB/s, {threads:2} threads: {speed / CAP:.3f} of it", flush=True)


if __name__ == "__main__":
    main()
