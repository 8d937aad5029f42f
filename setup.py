"""Builds the C++ kernels; everything else about the package is in pyproject.toml.

The kernels are a plain shared library with a C interface that Python opens with ctypes: no Python.h, no torch headers,
nothing of torch is needed to build. The same source is compiled once per instruction set. Where there is no compiler,
or it fails, the package is installed without the library and says so when it is first used.
"""

import os
import platform
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
X86 = platform.machine().lower() in ("x86_64", "amd64")


def compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def works(flags: list[str]) -> bool:
    """Whether the compiler takes these flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("int probe() { return 0; }\n")
        command = [*compiler(), *flags, "-c", str(source), "-o", str(Path(folder, "probe.o"))]
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
        flags = [*COMMON, *(["-DQKV_X86"] if X86 else [])]
        if works(["-fopenmp"]) and sys.platform.startswith("linux"):
            flags.append("-fopenmp")
        sets = {"portable": [], **({"avx2": AVX2, "avx512": AVX512} if X86 else {})}
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
        undefined = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else []
        command = [*compiler(), "-shared", *objects, "-o", str(target), *undefined]
        subprocess.run(command, check=True)


setup(
    ext_modules=[
        # `optional`: setuptools goes on when there is nothing to copy in an editable install.
        Extension("qkv._kernels", [str(p) for p in sorted(SOURCES.glob("*.cpp"))], optional=True),
    ],
    cmdclass={"build_ext": BuildKernels},
)
