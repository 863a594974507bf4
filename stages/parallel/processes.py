"""Process group of a training stage, joined at the start and left at the end, also after errors."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from stages.core.errors import ResourceError, TransientError
from stages.parallel.accelerator import device_of_this_process, of_device
from stages.parallel.ranks import RENDEZVOUS_FILE

USUAL_TIMEOUT = timedelta(minutes=30)
"""Default timeout of gloo's collectives in torch; NCCL's is 10 minutes."""
MARGIN = timedelta(minutes=1)
"""Time by which collectives wait longer than the watchdog that ends a hanging stage, to let the watchdog act first."""
BACKLOG = 1024
"""Number of processes that may queue for a connection to the store by which processes find each other."""


def collective_timeout(hang_timeout_s: float) -> timedelta:
    """Return the timeout of collectives: 30 minutes or more, above the watchdog's, which logs what went on."""
    return max(USUAL_TIMEOUT, timedelta(seconds=hang_timeout_s) + MARGIN)


@contextmanager
def joined_processes(timeout: timedelta = USUAL_TIMEOUT) -> Iterator[torch.device]:
    """Join the launcher's process group (`ranks.py`), or a group of one, and yield this process's device.

    CPU tensors always have a backend (gloo): checkpoints and offloaded gradients need it on GPUs too.
    """
    device = device_of_this_process()
    backend = of_device(device).backends
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = _store(rank, world_size, timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store through which processes meet: one node's private file, or a socket on the first node."""
    if "RANK" not in os.environ:
        return dist.HashStore()  # started by hand: a group of one needs neither file nor port
    if RENDEZVOUS_FILE in os.environ:
        store = dist.FileStore(os.environ[RENDEZVOUS_FILE], world_size)
        store.set_timeout(timeout)  # torch sets that of its own stores only; NCCL waits here while rank 0 reads a model
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Only rank 0 listens; the others connect, and try again until it does.
    if rank:
        return dist.TCPStore(address, port, world_size, timeout=timeout)
    # `detach`: the store owns the file descriptor from here on, and closes it.
    listener = _listener(address, port, timeout).detach()
    return dist.TCPStore(address, port, world_size, True, timeout, master_listen_fd=listener)


def _listener(address: str, port: int, timeout: timedelta) -> socket.socket:
    """Return a listening socket bound only to this node's `address`; torch's own listens on every interface.

    In Kubernetes, the name service may know a pod's name only some time after its start.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(place[:2], family=family, backlog=BACKLOG)
        except socket.gaierror as error:
            if time.monotonic() > deadline_s:
                raise TransientError(f"finding this node's address {address}: {error.strerror}") from error
            time.sleep(1)
        except OSError as error:
            failed = f"cannot listen on {address}:{port} for the other processes: {error.strerror}"
            raise ResourceError(
                f"{failed}; the first node must own that address, and no other program may listen there"
            ) from error


def gathered(value: float) -> list[float]:
    """Gather one number from every process; return all of them in the order of ranks. Collective."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    # Each vector is 0 but at its process's rank, so that their sum is all numbers in order.
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()
