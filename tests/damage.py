"""Saved caches that are no longer what was written, in each way that a file can be."""

from __future__ import annotations

import json
import random
import struct
import zlib
from typing import Any


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_together(header: dict[str, Any], data: bytes) -> bytes:
    """A file of this header, whose checksum holds."""
    text = json.dumps(header).encode()
    text = struct.pack("<Q", len(text)) + text
    return text + struct.pack("<Q", zlib.crc32(text)) + data[8:]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The file, cut or changed somewhere: never what it was."""
    changed = bytearray(data)
    kind = chance.choice(("cut", "cut header", "longer", "bit", "bit in header", "bytes", "zeros", "moved", "header"))
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    at = chance.randrange(len(data))
    if kind == "cut":
        return data[:at]
    if kind == "cut header":
        return data[: chance.randrange(header_end)]
    if kind == "longer":
        return data + bytes(chance.randint(1, 99))
    if kind == "bit in header":
        at = chance.randrange(header_end)
    if kind in ("bit", "bit in header"):
        changed[at] ^= 1 << chance.randrange(8)
    elif kind in ("bytes", "zeros"):
        n = min(chance.randint(1, 300), len(data) - at)
        changed[at : at + n] = bytes(n) if kind == "zeros" else chance.randbytes(n)
    elif kind == "moved":
        other = chance.randrange(len(data) - 64)
        n = chance.randint(8, 64)
        changed[at : at + n], changed[other : other + n] = data[other : other + n], data[at : at + n]
        changed = changed[: len(data)]
    else:
        header, rest = split(data)
        names = [name for name in header if name.startswith("layers")]
        one, other = chance.sample(names, 2)
        header[one], header[other] = header[other], header[one]  # tensors change places
        text = json.dumps(header, separators=(",", ":")).encode()
        changed = bytearray(struct.pack("<Q", len(text)) + text + rest)
    return bytes(changed)


def with_another_header(data: bytes, chance: random.Random) -> bytes:
    """The file with something else in its header, whose checksum holds: as another library might write it."""
    header, rest = split(data)
    what = chance.choice(("layers", "config", "layout", "model", "offsets", "shape", "dtype", "gone"))
    if what in ("layers", "config", "layout", "model"):
        text = header["__metadata__"][what]
        numbers = [i for i, letter in enumerate(text) if letter.isdigit()]
        if chance.random() < 0.2 or not numbers:
            at = chance.randrange(len(text))
            text = text[:at] + text[at + 1 :]
        else:
            at = chance.choice(numbers)
            text = text[:at] + chance.choice(("9", "0", "-1", "77777", "null", '"x"')) + text[at + 1 :]
        header["__metadata__"][what] = text
    else:
        name = chance.choice([name for name in header if name.startswith("layers")])
        if what == "gone":
            del header[name]
        elif what == "dtype":
            header[name]["dtype"] = chance.choice(("F64", "U8", "X7", "BF16"))
        else:
            place = header[name]["data_offsets" if what == "offsets" else "shape"]
            place[chance.randrange(len(place))] = chance.choice((-1, 0, 3, 10**9, None, "7"))
    return put_together(header, rest)
