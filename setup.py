"""Builds the C++ kernels; everything else about the package is in pyproject.toml.

The kernels are a plain shared library with a C interface that Python opens with ctypes: no Python.h, no torch headers,
nothing of torch is needed to build. The same source is compiled once per instruction set. Where there is no compiler,
or it fails, the package is installed without the library and says so when it is first used.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("qkv/csrc")
COMMON = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
# A multiplication and an addition stay two roundings unless the source says otherwise, as in Python's formats.
COMMON += ["-ffp-contract=off", "-Wall", "-Wextra"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
# GCC 12 takes the deliberately undefined registers of its own header for mistakes.
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# For each processor, by the macro that compilers define for it: our own macro, and what is built beside `portable`.
PROCESSORS = {
    "__x86_64__": ("QKV_X86", {"avx2": AVX2, "avx512": AVX512}),
    "__aarch64__": ("QKV_ARM64", {"neon": []}),
}


def compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def macros() -> set[str]:
    """The macros that the compiler defines. It knows what it compiles for, which need not be this machine."""
    command = [*compiler(), "-dM", "-E", "-x", "c++", os.devnull]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[1] for line in lines if line.startswith("#define ")}


def has_openmp() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <omp.h>\n")
        command = [*compiler(), "-fopenmp", "-c", str(source), "-o", str(Path(folder, "probe.o"))]
        return subprocess.run(command, capture_output=True).returncode == 0


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set, and links without an OpenMP runtime.

    The runtime is whichever torch has loaded: qkv/native.py makes its symbols visible before it opens the library.
    """

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(Path(self.get_ext_fullpath(ext.name)))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"qkv: the C++ kernels were not built, attention will be slower: {error}", file=sys.stderr)

    def _build(self, target: Path) -> None:
        known = macros()
        flags, sets = list(COMMON), {"portable": []}
        for macro, (ours, more) in PROCESSORS.items():
            if macro in known:
                flags.append(f"-D{ours}")
                sets |= more
        # Clang's calls are to LLVM's runtime alone, which is not what torch has loaded on Linux; GCC's are to either.
        if "__linux__" in known and "__clang__" not in known and has_openmp():
            flags.append("-fopenmp")
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        jobs = {"dispatch": [], **{f"kernels_{name}": extra for name, extra in sets.items()}}
        running = []
        for name, extra in jobs.items():
            command = [
                *compiler(),
                *flags,
                *extra,
                "-c",
                str(SOURCES / f"{name}.cpp"),
                "-o",
                str(folder / f"{name}.o"),
            ]
            running.append((command, subprocess.Popen(command)))
        for command, process in running:
            if process.wait() != 0:
                raise subprocess.CalledProcessError(process.returncode, command)
        objects = [str(folder / f"{name}.o") for name in jobs]
        undefined = ["-Wl,-undefined,dynamic_lookup"] if "__APPLE__" in known else []
        command = [*compiler(), "-shared", *objects, "-o", str(target), *undefined]
        subprocess.run(command, check=True)


setup(
    ext_modules=[
        # `optional`: setuptools goes on when there is nothing to copy in an editable install.
        Extension("qkv._kernels", [str(p) for p in sorted(SOURCES.glob("*.cpp"))], optional=True),
    ],
    cmdclass={"build_ext": BuildKernels},
)
