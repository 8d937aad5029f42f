"""The kernels as a compiler for AArch64 makes them, run by an emulator on this machine.

``setup.py`` builds the library with zig's C++ compiler, flags and all. Its object files are linked once more, together
with the few functions of a C library that they call, to a program without any dependency. :class:`Emulated` puts that
into the emulator's memory and has the functions of the library; what it is asked to work on stays where it is.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FUNCTIONS = ("qkv_attend", "qkv_append", "qkv_encode", "qkv_decode", "qkv_select", "qkv_isa", "qkv_abi")
# What the kernels call. One thread is all there is, and memory is never given back.
LIBC = """
#include <cstddef>
extern "C" {
void* __dso_handle;
int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }
int __cxa_guard_acquire(char* guard) { return !*guard; }
void __cxa_guard_release(char* guard) { *guard = 1; }
void abort() { __builtin_trap(); }
void free(void*) {}
void* aligned_alloc(size_t, size_t n) {
  alignas(64) static char room[64 << 20];
  static size_t used;
  char* const p = room + used;
  used += (n + 63) / 64 * 64;
  if (used > sizeof room) abort();
  return p;
}
void* memcpy(void* to, const void* from, size_t n) {
  for (size_t i = 0; i < n; ++i) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}
void* memset(void* to, int c, size_t n) {
  for (size_t i = 0; i < n; ++i) static_cast<char*>(to)[i] = static_cast<char>(c);
  return to;
}
int strcmp(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a - *b;
}
float tanhf(float x) {
  if (!(x > -20 && x < 20)) return x < 0 ? -1 : x > 0 ? 1 : x;
  double e = 1, term = 1;  // e^(2 x / 1024), then squared ten times
  for (int k = 1; k < 12; ++k) e += term *= x / 512.0 / k;
  for (int k = 0; k < 10; ++k) e *= e;
  return static_cast<float>(1 - 2 / (e + 1));
}
int NAMES();
extern int (*const functions[])();  // a program begins where its functions are listed
int (*const functions[])() = {NAMES};
}
"""


LINUX = "aarch64-linux-gnu"


def build(folder: Path, target: str = LINUX) -> Path:
    """Builds the library in ``folder``, an empty one, as ``pip`` does; its object files are in ``objects``."""
    compiler = folder / "compiler"
    # A library for C++ is not needed, and takes zig a minute to make.
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) set -- -nostdlib "$@";; esac\n'
        f'exec "{sys.executable}" -m ziglang c++ -target {target} "$@"\n'
    )
    compiler.chmod(0o755)
    # A copy, without the project's file: older releases of setuptools do not read it.
    shutil.copytree(ROOT / "qkv" / "csrc", folder / "qkv" / "csrc")
    shutil.copy(ROOT / "setup.py", folder)
    places = ["--build-lib", "library", "--build-temp", "objects"]
    _run([sys.executable, "setup.py", "-q", "build_ext", *places], folder, {"CXX": str(compiler)})
    return next((folder / "library").rglob("_kernels*"))


def program(folder: Path) -> Path:
    """Links what :func:`build` left in ``folder`` to a program without dependencies."""
    source, target = folder / "libc.cpp", folder / "program"
    source.write_text(
        LIBC.replace("int NAMES()", f"int {'(), '.join(FUNCTIONS)}()").replace("NAMES", ", ".join(FUNCTIONS))
    )
    zig(folder, LINUX, "-O1", "-fno-builtin", "-c", str(source), "-o", str(folder / "libc.o"))
    objects = [str(path) for path in (folder / "libc.o", *sorted((folder / "objects").glob("*.o")))]
    zig(folder, LINUX, "-static", "-nostdlib", "-Wl,-e,functions", *objects, "-o", str(target))
    return target


def zig(folder: Path, target: str, *arguments: str) -> None:
    """Runs the compiler in ``folder``."""
    _run([sys.executable, "-m", "ziglang", "c++", "-target", target, *arguments], folder)


def _run(command: list[str], folder: Path, changes: dict[str, str] | None = None) -> None:
    cache = str(folder / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache, **(changes or {})}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


class Emulated:
    """Has the functions of the library that ``qkv.native`` opens, with the same arguments.

    Memory of this process has the same addresses for the emulated program: it is mapped where the program asks for it.
    """

    STACK, THREAD, END, SIZE = 0x10000000, 0x20000000, 0x30000000, 1 << 20  # above the program, below all else

    def __init__(self, path: Path):
        import unicorn
        from unicorn import arm64_const as arm

        self._arm, self._all = arm, unicorn.UC_PROT_ALL
        self._machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._mapped: list[tuple[int, int]] = []  # in order
        self.calls = 0
        data = path.read_bytes()
        entry, headers = struct.unpack_from("<2Q", data, 24)
        width, count = struct.unpack_from("<2H", data, 54)
        parts = [struct.unpack_from("<2I6Q", data, headers + i * width) for i in range(count)]
        loaded = [part for part in parts if part[0] == 1]
        first, last = loaded[0][3] & -4096, max(part[3] + part[6] for part in loaded)
        self._machine.mem_map(first, (last - first + 4095) & -4096)
        for _, _, offset, address, _, size, _, _ in loaded:
            self._machine.mem_write(address, data[offset : offset + size])
        assert last < self.STACK
        for address in (self.STACK, self.THREAD):
            self._machine.mem_map(address, self.SIZE)
        self._machine.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, self._map)
        addresses = struct.unpack(f"<{len(FUNCTIONS)}Q", self._machine.mem_read(entry, 8 * len(FUNCTIONS)))
        self._address = dict(zip(FUNCTIONS, addresses, strict=True))

    def _map(self, machine: Any, access: int, address: int, *rest: Any) -> bool:
        """Maps the part of this process's memory around ``address`` that is not mapped yet."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if start <= address < end and line.split()[1].startswith("rw"):
                at = bisect.bisect(self._mapped, (address, 0))
                if at:
                    start = max(start, self._mapped[at - 1][1])
                if at < len(self._mapped):
                    end = min(end, self._mapped[at][0])
                machine.mem_map_ptr(start, end - start, self._all, start)
                self._mapped.insert(at, (start, end))
                return True
        return False

    def call(self, name: str, *arguments: Any) -> int:
        self.calls += 1
        arm = self._arm
        for i, x in enumerate(arguments):
            self._machine.reg_write(arm.UC_ARM64_REG_X0 + i, ctypes.addressof(x) if hasattr(x, "_fields_") else int(x))
        self._machine.reg_write(arm.UC_ARM64_REG_SP, self.STACK + self.SIZE)
        self._machine.reg_write(arm.UC_ARM64_REG_TPIDR_EL0, self.THREAD)
        self._machine.reg_write(arm.UC_ARM64_REG_LR, self.END)
        self._machine.emu_start(self._address[name], self.END)
        return ctypes.c_int64(self._machine.reg_read(arm.UC_ARM64_REG_X0)).value

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        return lambda *arguments: ctypes.c_int32(self.call(name, *arguments)).value

    def qkv_abi(self) -> int:
        return self.call("qkv_abi")

    def qkv_isa(self) -> bytes:
        return bytes(self._machine.mem_read(self.call("qkv_isa"), 16)).split(b"\0")[0]

    def qkv_select(self, name: bytes) -> int:
        held = ctypes.create_string_buffer(name)
        return ctypes.c_int32(self.call("qkv_select", ctypes.addressof(held))).value
