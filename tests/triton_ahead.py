"""Compiles what a GPU would be asked to run, without one; test_triton.py runs this file in a process of its own.

A call of attention, and of the encoder, on CPU tensors is caught where it would launch a kernel. Prints JSON: for each
kernel the registers, and the bytes of stack and local memory of a thread, which are spilled registers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qkv.attention import triton_decode, triton_kernels
from qkv.config import CacheConfig
from qkv.formats import triton_encode
from qkv.storage import LayerStore
from qkv.view import KVView

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


class Caught:
    """In the place of a kernel: keeps the arguments of a launch."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.launch: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.launch = args, constants

        return launch

    def compiled(self, arch: int) -> dict[str, int]:
        """Compiled for ``sm_<arch>``, as Triton would for these arguments: what a thread takes."""
        assert self.launch is not None
        args, constants = self.launch
        options = {"enable_fp_fusion": True, **{name: constants[name] for name in OPTIONS if name in constants}}
        constants = {name: value for name, value in constants.items() if name not in OPTIONS}
        signature, attributes = {}, {}
        names = [name for name in self.kernel.arg_names if name not in constants]
        fixed = {param.name for param in self.kernel.params if not param.do_not_specialize}
        for name, value in zip(names, args, strict=True):
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if isinstance(value, int) and value == 1 and name in fixed:
                signature[name], constants[name] = "constexpr", 1
            elif aligned and name in fixed:
                attributes[(self.kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
        signature = {name: signature.get(name, "constexpr") for name in self.kernel.arg_names}
        source = ASTSource(self.kernel, signature, constants, attributes)
        return usage(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["cubin"])


def usage(cubin: bytes) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout)
    assert found is not None, said.stdout
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


def caught(format: str, kv_heads: int, group: int, dim: int, q_len: int, arch: int) -> dict[str, Caught]:
    """The launches for a bfloat16 model with a cache in that format, by name."""
    triton_decode._native_fp8 = lambda device: arch >= 89  # type: ignore[assignment]
    kernels = {name: Caught(getattr(triton_kernels, name)) for name in ("attend", "fold", "merge")}
    try:
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, kernel)
        store = LayerStore(CacheConfig(format))
        keys, values = torch.randn(2, 1, kv_heads, 300, dim, dtype=torch.bfloat16)
        store.append(keys, values)
        query = torch.randn(1, kv_heads * group, q_len, dim, dtype=torch.bfloat16)
        triton_decode.attend(query, KVView(store), None, dim**-0.5, True, None, None)
    finally:
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, kernel.kernel)
    encoder = triton_encode.encode
    for side, rows in zip(("key", "value"), (keys, values), strict=True):
        plane = getattr(store.packed[0], side)
        kernels[side] = triton_encode.encode = Caught(encoder)
        tokens = plane.scaling.tokens
        if plane.format.bits == 8:
            plane.layout = triton_encode.ROWS  # as on a GPU
        if not triton_encode.write(plane, 0, rows[:, :, :tokens]):
            del kernels[side]
    triton_encode.encode = encoder
    return {name: kernel for name, kernel in kernels.items() if kernel.launch is not None}


def main(jobs: list[dict[str, Any]]) -> None:
    """Each job: format, kv_heads, group, dim, q_len, arch, and the names of the kernels wanted."""
    for job in jobs:
        wanted = job.pop("kernels")
        for name, kernel in caught(**job).items():
            if name in wanted:
                print(json.dumps({**job, "kernel": name, **kernel.compiled(job["arch"])}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
