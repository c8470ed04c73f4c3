#!/usr/bin/env python3
"""Packs the wheel: what pip asks of a project, with nothing to install for it. `make wheel` calls it as a program."""

import base64
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = pathlib.Path(os.environ.get("SERRIED_BUILD_DIR", ROOT / "build"))
SUMMARY = "Shared memory for torch.distributed: DDP, FSDP2, DTensor on one host without sockets"


def run(*words):
    subprocess.run([str(word) for word in words], check=True, stdout=sys.stderr)


def version():
    return re.search(r"project\(serried VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def metadata():
    return f"Metadata-Version: 2.1\nName: serried\nVersion: {version()}\nSummary: {SUMMARY}\nRequires-Python: >=3.10\nRequires-Dist: torch==2.13.*\n"


def tag():
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def built_files(stage):
    """What the build gives for the wheel, in `stage`."""
    if not (BUILD / "CMakeCache.txt").exists():
        run("make", "-C", ROOT, "configure")
    run("cmake", "--build", BUILD, "--target", "serried_wheel_files", "-j", os.environ.get("JOBS", os.cpu_count()))
    run("cmake", "--install", BUILD, "--component", "python", "--prefix", stage, "--strip")


def info_files():
    texts = {
        "METADATA": metadata(),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: serried\nRoot-Is-Purelib: false\nTag: {tag()}\n",
        "entry_points.txt": "[console_scripts]\nserried = serried._command:main\n",
        "LICENSE": (ROOT / "LICENSE").read_text(),
    }
    return {f"serried-{version()}.dist-info/{name}": text.encode() for name, text in texts.items()}


def add(archive, name, data, executable):
    entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
    entry.external_attr = (0o100755 if executable else 0o100644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = f"serried-{version()}-{tag()}.whl"
    with tempfile.TemporaryDirectory() as stage:
        built_files(stage)
        record = f"serried-{version()}.dist-info/RECORD"
        pathlib.Path(wheel_directory).mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as archive:
            lines = ""
            for path in sorted(path for path in pathlib.Path(stage).rglob("*") if path.is_file()):
                lines += add(archive, str(path.relative_to(stage)), path.read_bytes(), os.access(path, os.X_OK))
            for inside, data in info_files().items():
                lines += add(archive, inside, data, False)
            add(archive, record, (lines + f"{record},,\n").encode(), False)
    return name


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    for inside, data in info_files().items():
        path = pathlib.Path(metadata_directory) / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return f"serried-{version()}.dist-info"


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else BUILD / "wheels"
    print(f"{folder}/{build_wheel(folder)}")
