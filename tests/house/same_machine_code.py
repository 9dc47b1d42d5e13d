# SPDX-License-Identifier: Apache-2.0
"""Whether two builds hold the same kernels: the proof of a change that only moves or renames.

    python tests/house/same_machine_code.py BEFORE AFTER [--ignore-parameters] [--cuobjdump PATH]

BEFORE and AFTER are build folders (cmake -G Ninja -B BEFORE ...; ninja -C BEFORE). Compared are, of
every cubin in their objects, the machine code of each function, what ptxas said of it (registers,
stack, spills, shared and constant memory), and the functions that libcuattn.so exports. A function
is found again by its name; one whose name changed, by its code. Not a test: it needs two builds and
cuobjdump.

--ignore-parameters is for a change of the structs that kernels receive: the code is compared but
for the places of its parameters, and what is not equal is given with its number of instructions.
AFTER may then be a part of a build.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Names of what only one file sees carry a hash of the file's path.
LOCAL = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")
# An instruction, two words of 8 bytes; in its text the place of a parameter: in constant bank 0,
# or so far behind an address there.
INSTRUCTION = re.compile(
    r"/\*[0-9a-f]+\*/\s+(.*?) ;\s+/\* (0x[0-9a-f]{16}) \*/\s+/\* (0x[0-9a-f]{16}) \*/"
)
PLACE = re.compile(r"c\[0x0\]\[0x[0-9a-f]+\]|(?<=, )0x[0-9a-f]+(?=, U?RZ$)")
USED = re.compile(r"Compiling entry .*? for '(\w+)'((?:\n.*?){1,3}?Used .*)")


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and contents of the sections of a 64-bit little-endian ELF file."""
    table, entry_bytes, count, names_at = struct.unpack_from("<Q10xHHH", elf, 0x28)
    entries = [struct.unpack_from("<II16xQQ", elf, table + i * entry_bytes) for i in range(count)]
    names = elf[entries[names_at][2] :]
    for name, kind, offset, size in entries:
        if kind != 8:  # SHT_NOBITS has no bytes in the file
            yield names[name : names.index(b"\0", name)].decode(), elf[offset : offset + size]


def objects(build: Path) -> list[Path]:
    return sorted(path for path in build.rglob("*.cu.o") if "CMakeFiles/cuattn_cuda" in str(path))


def machine_code(build: Path, cuobjdump: str) -> dict[tuple[str, str], list[str]]:
    """(architecture, function) to the hashes of its code, one for each object that has it."""
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for path in objects(build):
        with tempfile.TemporaryDirectory() as folder:
            command = [cuobjdump, "-xelf", "all", str(path.resolve())]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            for cubin in Path(folder).iterdir():
                arch = cubin.name.split(".")[-2]
                for name, code in sections(cubin.read_bytes()):
                    if name.startswith(".text."):
                        function = LOCAL.sub("local", name.removeprefix(".text."))
                        found[arch, function].append(hashlib.sha256(code).hexdigest()[:16])
    return {key: sorted(hashes) for key, hashes in found.items()}


def code_without_places(build: Path, cuobjdump: str) -> dict[tuple[str, str], list[str]]:
    """As machine_code, with the number of instructions in front of each hash."""
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for path in objects(build):
        command = [cuobjdump, "-sass", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for part in re.split(r"^Fatbin \w+ code:$", text, flags=re.MULTILINE)[1:]:
            arch = re.findall(r"^arch = (\w+)", part, flags=re.MULTILINE)[0]
            for function in part.split("\t\tFunction : ")[1:]:
                name, _, body = function.partition("\n")
                lines = [
                    (PLACE.sub("?", text), high) if PLACE.search(text) else (low, high)
                    for text, low, high in INSTRUCTION.findall(body)
                ]
                digest = hashlib.sha256(repr(lines).encode()).hexdigest()[:16]
                found[arch, LOCAL.sub("local", name)].append(f"{len(lines)} {digest}")
    return {key: sorted(hashes) for key, hashes in found.items()}


def resources(build: Path) -> collections.Counter[str]:
    """What ptxas said, without names: a line for each function and architecture."""
    lines: collections.Counter[str] = collections.Counter()
    for path in objects(build):
        text = Path(f"{path}.ptxas").read_text(encoding="utf-8")
        for arch, used in USED.findall(text):
            numbers = re.sub(r"ptxas info\s*:|Function properties for \S+|Compile time.*", "", used)
            lines[f"{arch}: {' '.join(numbers.split())}"] += 1
    return lines


def exports(build: Path) -> set[str]:
    """Functions that the library exports."""
    library = next(build.rglob("libcuattn.so"))
    command = ["nm", "-D", "--defined-only", str(library)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in text.splitlines()}


def differences(before: Path, after: Path, cuobjdump: str, ignore_parameters: bool) -> list[str]:
    code = code_without_places if ignore_parameters else machine_code
    old, new = code(before, cuobjdump), code(after, cuobjdump)
    same = [key for key in old if new.get(key) == old[key]]
    lost = {key: hashes for key, hashes in old.items() if key not in same}
    more = {key: hashes for key, hashes in new.items() if key not in same}
    by_code = collections.defaultdict(list)
    for key, hashes in more.items():
        by_code[(key[0], *hashes)].append(key)
    renamed = 0
    for key, hashes in list(lost.items()):
        if candidates := by_code[(key[0], *hashes)]:
            del more[candidates.pop()], lost[key]
            renamed += 1
    print(f"{len(old)} functions before, {len(new)} after; {len(same)} equal by name and code")
    print(f"{renamed} more have equal code under another name")
    if ignore_parameters:
        sizes = {key: " ".join(x.split()[0] for x in hashes) for key, hashes in more.items()}
        return [f"{n} instructions: {arch} {name}" for (arch, name), n in sizes.items()]
    said, says = resources(before), resources(after)
    print(f"{sum(said.values())} lines of ptxas before, {sum(says.values())} after")
    found = [f"- {arch} {name}" for arch, name in lost] + [
        f"+ {arch} {name}" for arch, name in more
    ]
    found += [f"- {n} x {line}" for line, n in (said - says).items()]
    found += [f"+ {n} x {line}" for line, n in (says - said).items()]
    has, had = exports(after), exports(before)
    print(f"{len(had)} exported functions before, {len(has)} after")
    return found + [f"- {name}" for name in had - has] + [f"+ {name}" for name in has - had]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--ignore-parameters", action="store_true")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    arguments = parser.parse_args()
    found = differences(
        arguments.before, arguments.after, arguments.cuobjdump, arguments.ignore_parameters
    )
    print("\n".join(found) or "no difference")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
