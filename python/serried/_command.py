"""The command `serried`, and what Python asks it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys


def _path():
    """Of the program: in the wheel, else in the build folder."""
    here = pathlib.Path(__file__).parent
    for folder in (here, pathlib.Path(os.path.abspath(__file__)).parents[2]):
        if (folder / "bin" / "serried").exists():
            return str(folder / "bin" / "serried")
    raise FileNotFoundError(f"the program serried is not beside {here}\n  fix: install serried again")


def _environment():
    """For the program: where its LibTorch is, if torch is installed in another folder than this package, so in a venv that sees the system's."""
    beside = pathlib.Path(__file__).parents[1] / "torch"
    torch = importlib.util.find_spec("torch")
    if beside.exists() or torch is None or not _path().startswith(str(pathlib.Path(__file__).parent)):
        return os.environ
    folders = [str(pathlib.Path(torch.origin).parent / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(folders)}


def main():
    """The entry point of the wheel."""
    program = _path()
    os.execve(program, [program, *sys.argv[1:]], _environment())


def ask(*words, check=True):
    """What `serried <words>` prints; RuntimeError with what it complains about."""
    done = subprocess.run([_path(), *words], env=_environment(), capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout).strip())
    return done.stdout


def doctor():
    """What works on this machine, and why the rest does not: a dict, as `serried doctor --json` prints it.

    serried.doctor()["healthy"]
    """
    return json.loads(ask("doctor", "--json", check=False))


def explain(op, *placements, mesh, shapes=None, args=None):
    """How serried's DTensor runs an op, and what it sends, as text. (PyTorch's DTensor plans by itself.)

    print(serried.explain("aten::mm", "S0 R", "R S1", mesh="dp=2,tp=2"))
    """
    words = ["explain", op, *placements, "--mesh", mesh]
    if shapes is not None:
        words += ["--shapes", *shapes]
    if args is not None:
        words += ["--args", *args]
    return ask(*words)
