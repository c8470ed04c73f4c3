#!/usr/bin/env python3
"""Python's safetensors opens what serried_python_files writes, and the other way round."""

import ctypes
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

program, packages = sys.argv[1:]
sys.path.insert(0, packages)
try:
    import safetensors
except ImportError:
    sys.exit(f"Python's safetensors is not in {packages}\n  fix: run scripts/setup.sh test")


def packed(code, count, offset=0):
    return struct.pack(f"<{count}{code}", *(i + offset for i in range(count)))


def bfloat16(count):
    return b"".join(struct.pack("<f", float(i))[2:] for i in range(count))


EXPECTED = {
    "layer_weight": ("F32", [3, 5], packed("f", 15)),
    'half "quoted" ü': ("BF16", [2, 3], bfloat16(6)),
    "table": ("I64", [4], packed("q", 4)),
    "flag": ("BOOL", [3], bytes([0, 1, 1])),
    "number": ("F64", [], struct.pack("<d", 7.0)),
}
NAMES = {"F32": "float32", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool", "F64": "float64"}


def check_tensors(found):
    assert sorted(found) == sorted(EXPECTED), sorted(found)
    for name, (dtype, shape, data) in EXPECTED.items():
        tensor = found[name]
        assert (tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"])) == (dtype, shape, data), (name, tensor)


def check(path):
    """All tensors of a file, as the package reads them, and the metadata."""
    check_tensors(dict(safetensors.deserialize(path.read_bytes())))
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    return json.loads(path.read_bytes()[8:8 + length])["__metadata__"]


def check_by_map(folder):
    """The files that the map names, and of each the tensors that it has there."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: dict(safetensors.deserialize((folder / name).read_bytes())) for name in set(index["weight_map"].values())}
    assert len(files) > 2, files.keys()
    check_tensors({name: files[file][name] for name, file in index["weight_map"].items()})
    assert sum(len(tensors) for tensors in files.values()) == len(EXPECTED), files
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in EXPECTED.values()), index


def serialized(tensors, metadata):
    """What the package writes; releases before 0.8 take bytes, later ones addresses."""
    if not hasattr(safetensors, "TensorSpec"):
        given = {name: {"dtype": NAMES[dtype], "shape": shape, "data": data} for name, (dtype, shape, data) in tensors.items()}
        return safetensors.serialize(given, metadata)
    buffers = {name: ctypes.create_string_buffer(data, len(data)) for name, (_, _, data) in tensors.items()}
    given = {name: safetensors.TensorSpec(dtype=NAMES[dtype], shape=shape, data_ptr=ctypes.addressof(buffers[name]), data_len=len(data))
             for name, (dtype, shape, data) in tensors.items()}
    return safetensors.serialize(given, metadata)


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    subprocess.run([program, "write", folder], check=True)
    metadata = check(folder / "plain.safetensors")
    assert metadata == {"format": "pt", "note": "from C++", "tied": "layer_weight"}, metadata
    weight_map = json.loads((folder / "checkpoint" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(weight_map) == sorted(EXPECTED), weight_map
    check(folder / "checkpoint" / weight_map["table"])
    check_by_map(folder / "many")
    theirs = folder / "theirs.safetensors"
    theirs.write_bytes(serialized(EXPECTED, {"tied": "layer_weight"}))
    subprocess.run([program, "read", theirs], check=True)
    both = folder / "both.safetensors"
    both.write_bytes(serialized({**EXPECTED, "tied": EXPECTED["layer_weight"]}, None))
    subprocess.run([program, "read", both], check=True)
print("python files: fine")
