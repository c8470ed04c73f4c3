"""Shared memory for torch.distributed: `import serried`, then `init_process_group("serried")`.

Registers the backends
    serried        what ranks of one host have in common: shared memory; between hosts, shared memory and the network
    hierarchical   the same, also where all ranks share a host
    threads        ranks that are threads of one process
"""

import atexit
import os
import sys
import threading
import time

from serried import _check

_check.torch_fits()

from serried import _C  # noqa: E402

_check.one_libtorch()

import torch.distributed as _dist  # noqa: E402

from serried import watch  # noqa: E402
from serried._built import VERSION as __version__  # noqa: E402
from serried._command import doctor, explain  # noqa: E402

__all__ = ["doctor", "explain", "watch"]

# Their names here, and in serried.
_BACKENDS = {"serried": "auto", "hierarchical": "hierarchical", "threads": "threads"}


def _maker_of(backend):
    def make(group, options):
        return _C.make_backend(backend, group.store, group.group_rank, group.group_size, group.timeout, options or {})

    return make


def _rendezvous(url, timeout=None, **_):
    from datetime import timedelta

    yield _C.rendezvous(url, timeout or timedelta(minutes=30))
    raise RuntimeError("serried run: ranks meet once")


def _close():
    """While there is an interpreter: what is open may call back into it, and a thread that leaves a call when there is none ends the process."""
    waiting = set(_C.waiting_threads())
    is_open = _C.num_alive() > 0
    _C.close_all()
    soon = time.monotonic() + 0.2
    for thread in threading.enumerate() if is_open else ():
        if thread.daemon and thread is not threading.current_thread():
            # A thread that has only just begun to wait is not known yet.
            thread.join(5 if thread.native_id in waiting else max(0, soon - time.monotonic()))


def _register():
    for name, backend in _BACKENDS.items():
        _dist.Backend.register_backend(name, _maker_of(backend), extended_api=True, devices=["cpu"])
    # serried run keeps the store itself, and has taken MASTER_PORT where it does not.
    if os.environ.get("SERRIED_LAUNCHER"):
        sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = _rendezvous
    atexit.register(_close)


if _dist.is_available():
    _register()
