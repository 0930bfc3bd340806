"""Runs a few PTX instructions on integers, so that inline assembly can be tested without a GPU."""

from __future__ import annotations

import struct

WORD = 2**32 - 1


def run_ptx(code: str, registers: dict[str, int]) -> dict[str, int]:
    """Run code without branches as one thread would; return all 32-bit registers. `registers` are those that the code reads."""
    found = dict(registers)
    for statement in code.strip("{} ").split(";"):
        instruction, _, operands = statement.strip().partition(" ")
        if instruction in ("", ".reg"):
            continue
        out, *sources = (operand.strip() for operand in operands.split(","))
        values = [found[source] if source in found else int(source, 0) for source in sources]
        found[out] = _result(instruction, values) & WORD
    return found


def _result(instruction: str, values: list[int]) -> int:
    match instruction, values:
        case "mov.b32" | "mov.u32", [a]:
            return a
        case "shl.b32", [a, count]:
            return a << count
        case "shr.u32", [a, count]:
            return a >> count
        case "and.b32", [a, b]:
            return a & b
        case "xor.b32", [a, b]:
            return a ^ b
        case "lop3.b32", [a, b, c, table]:
            places = ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1 for n in range(32))
            return sum((table >> place & 1) << n for n, place in enumerate(places))
        case "prmt.b32", [a, b, selector]:
            eight = (b << 32 | a).to_bytes(8, "little")
            return sum(_selected(eight, selector >> 4 * n & 15) << 8 * n for n in range(4))
        case "mul.rn.f16x2", [a, b]:
            return _pack([x * y for x, y in zip(_halves(a), _halves(b), strict=True)])
        case "fma.rn.f16x2", [a, b, c]:
            return _pack([x * y + z for x, y, z in zip(_halves(a), _halves(b), _halves(c), strict=True)])
    raise NotImplementedError(instruction)


def _selected(eight: bytes, selector: int) -> int:
    """Return a byte, or with the highest bit of the selector its sign in all bits."""
    byte = eight[selector & 7]
    return (255 if byte & 128 else 0) if selector & 8 else byte


def _halves(register: int) -> tuple[float, ...]:
    return struct.unpack("<2e", struct.pack("<I", register))


def _pack(numbers: list[float]) -> int:
    """Round to fp16. Sums of products of fp16 numbers of similar size are exact in fp64, so they are rounded once."""
    (register,) = struct.unpack("<I", struct.pack("<2e", *numbers))
    return int(register)
