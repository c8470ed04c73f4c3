"""What has to hold before the library is loaded: one LibTorch in the process, and the one it was built with."""

import os

from serried import _built

WANTED = ".".join(_built.TORCH_VERSION.split(".")[:2])


def torch_fits():
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"serried {_built.VERSION} needs torch {WANTED}: {error}\n  fix: pip install torch=={WANTED}.*") from None
    if torch.__version__.split("+")[0].split(".")[:2] == WANTED.split("."):
        return
    raise ImportError(
        f"serried {_built.VERSION} was built with torch {_built.TORCH_VERSION}, and this is torch {torch.__version__} in {os.path.dirname(torch.__file__)}\n"
        f"  fix: pip install torch=={WANTED}.*, or build serried with the other one (make wheel)"
    )


def libtorch_files(maps):
    """The files of LibTorch among what /proc/self/maps says, sorted."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/") > 0)
    return sorted({path for path in paths if os.path.basename(path) == "libtorch_cpu.so"})


def one_libtorch(maps=None):
    if maps is None:
        try:
            with open("/proc/self/maps") as file:
                maps = file.read()
        except OSError:
            return
    files = libtorch_files(maps)
    if len(files) < 2:
        return
    raise ImportError(f"two LibTorch in one process: {', '.join(files)}\n  fix: unset LD_LIBRARY_PATH and LD_PRELOAD, or import torch before anything that loads another one")
