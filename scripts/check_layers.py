#!/usr/bin/env python3
"""Checks the shape of the tree: a layer includes only layers below it, the launcher knows no torch, files say what they are and stay short."""

import pathlib
import re
import sys

# A layer may include itself and every layer of a smaller number.
LAYERS = {"base": 0, "tape": 1, "launch": 2, "comm": 2, "mesh": 3, "spmd": 4, "tensor": 5, "parallel": 6, "graph": 6, "optim": 6, "checkpoint": 7, "elastic": 8}
# Within a layer: which rooms a room may include besides itself. A room is a folder, or a file beside the folders by
# name; all other files beside them lie below every room.
ROOMS = {"graph": {"text": "", "passes": "text", "record": "text", "replay": "record text",
                   "capture_states": "record replay", "capture": "text passes record replay capture_states"}}
MAX_LINES = 600
FOLDERS = ["serried", "tools", "tests", "benchmarks", "examples", "python"]
SCRIPTS = ["scripts", "cmake"]

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
TORCH_FREE = ("serried/launch/", "serried/base/traces/", "serried/base/channel/")  # what the launcher is made of


def layer_of(path):
    parts = path.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "serried" else None


def room_of(path):
    parts = path.split("/")
    return parts[2].split(".")[0]


def check_room(layer, path, included):
    """As check_include, for two files of one layer."""
    rooms, mine, other = ROOMS.get(layer, {}), room_of(path), room_of(included)
    for name in (path, included):
        if rooms and name.count("/") > 2 and room_of(name) not in rooms:
            return f"folder serried/{layer}/{room_of(name)}/ is not among the rooms of scripts/check_layers.py"
    if mine == other or other not in rooms or other in rooms.get(mine, "").split():
        return None
    return f"includes {included}: room {other} of {layer} is not below {mine}"


def check_include(path, included):
    """The complaint about `path` including `included`, or None."""
    mine, other = layer_of(path), layer_of(included)
    if mine is None or other is None:
        return "includes the umbrella header, which holds higher layers" if mine and included == "serried/serried.h" else None
    if mine == other:
        return check_room(mine, path, included)
    for name in (mine, other):
        if name not in LAYERS:
            return f"folder serried/{name}/ is not in the layer table of scripts/check_layers.py"
    if LAYERS[other] >= LAYERS[mine]:
        return f"includes {included}: layer {other} ({LAYERS[other]}) is not below {mine} ({LAYERS[mine]})"
    return None


def includes_of(root, name):
    """(line number, included name) of each include of a file of ours; none where there is no such file."""
    path = root / name
    if not path.is_file():
        return []
    found = ((number, INCLUDE.match(line)) for number, line in enumerate(path.read_text().splitlines(), 1))
    return [(number, match[1]) for number, match in found if match]


def torch_header_behind(root, name, seen):
    """The first header of LibTorch that `name` brings, itself or through headers of ours, or None."""
    if TORCH.match(name):
        return name
    if name in seen:
        return None
    seen.add(name)
    return next(filter(None, (torch_header_behind(root, other, seen) for _, other in includes_of(root, name))), None)


def check_includes(root, name):
    for number, included in includes_of(root, name):
        if problem := check_include(name, included):
            yield f"{name}:{number}: {problem}"
        if name.startswith(TORCH_FREE) and (header := torch_header_behind(root, included, set())):
            yield f"{name}:{number}: includes {included}, which brings {header}; the launcher runs before LibTorch is loaded"


def first_line_problem(path, lines):
    first = lines[0] if lines else ""
    if path.endswith((".h", ".cpp")):
        told = first.startswith("// ")
    elif first.startswith("#!"):  # a script: the line after
        told = len(lines) > 1 and lines[1].startswith(("# ", '"""'))
    else:
        told = first.startswith(("# ", '"""'))
    return None if told else "does not begin with one sentence that says what it is"


def files(root):
    suffixes = {".h", ".cpp", ".cmake", ".sh", ".py", ".in"}
    for folder in FOLDERS + SCRIPTS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and (path.suffix in suffixes or path.name == "CMakeLists.txt"):
                yield path


def check(root):
    problems = []
    for path in files(root):
        name = path.relative_to(root).as_posix()
        lines = path.read_text().splitlines()
        if len(lines) > MAX_LINES:
            problems.append(f"{name}: {len(lines)} lines, more than {MAX_LINES}; split it by idea")
        if path.name != "CMakeLists.txt" and (problem := first_line_problem(name, lines)):
            problems.append(f"{name}:1: {problem}")
        if path.suffix in {".h", ".cpp"}:
            problems += check_includes(root, name)
    return problems


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    problems = check(root)
    print("\n".join(problems) if problems else "layers: fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
