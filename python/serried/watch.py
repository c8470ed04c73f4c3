"""What groups are doing, and what they look for in what ranks send."""

import os

from serried import _C
from serried._command import ask


def _backend_of(group):
    import torch
    import torch.distributed as dist

    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def set_nan_check(mode, group=None):
    """What `group` does from its next call on about NaN in what this rank sends: "off", "warn" or "raise" before it is sent.

    serried.watch.set_nan_check("raise")
    """
    _C.set_nan_check(_backend_of(group), mode)


def report(job=None):
    """What `serried top` shows once: where the ranks of a job under serried run are, as text. The job of this rank where none is named.

    print(serried.watch.report())
    """
    mine = os.getpid() if os.environ.get("SERRIED_LAUNCHER") else None
    named = job or mine
    return ask("top", "--once", *([] if named is None else [str(named)]))
