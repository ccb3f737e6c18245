"""Build libpad with CMake, then package it next to the Python code; the metadata is in pyproject.toml.

It takes a C++17 compiler, no GPU and no torch. Without a compiler the package installs all the same, without libpad,
and says so; PAD_CUDA=1 asks for the CUDA kernels and makes any failure to build an error.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
PAD_CUDA = os.environ.get("PAD_CUDA", "0")
if PAD_CUDA not in ("0", "1"):
    sys.exit(f"PAD_CUDA must be 0 or 1, got {PAD_CUDA!r}")

WARNING = """
*** libpad was NOT built: {error}
*** The package works without it, on slower torch code for the CPU. To have it, install CMake and a C++17 compiler
*** (on Debian or Ubuntu: apt install g++) and install this package again; `pad info` says whether it is there.
"""


def package_folders() -> dict[str, str]:
    """Every folder of pad_engine/ that holds Python, and kernels/, by the name it is imported by."""
    # the top-level import name `kernels` belongs to another project, so ours installs inside the package
    folders = {"pad_engine.kernels": "kernels"}
    for folder in {path.parent.relative_to(ROOT) for path in (ROOT / "pad_engine").rglob("*.py")}:
        folders[".".join(folder.parts)] = str(folder)
    return dict(sorted(folders.items()))


class CMakeBuild(build_ext):
    """Builds the one extension, libpad, as a plain shared library."""

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        # one from an earlier build must not pass for this one's
        out.unlink(missing_ok=True)
        try:
            self.run_cmake(out.parent)
        except (OSError, subprocess.CalledProcessError) as error:
            if PAD_CUDA == "1":
                raise RuntimeError(f"libpad could not be built, and PAD_CUDA=1 asks for it: {error}") from error
            print(WARNING.format(error=error), file=sys.stderr, flush=True)

    def run_cmake(self, out: Path) -> None:
        build = Path(self.build_temp).resolve() / "cmake"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        options = [
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
            "-DCMAKE_BUILD_TYPE=" + ("Debug" if self.debug else "Release"),
            "-DPAD_CUDA=" + ("ON" if PAD_CUDA == "1" else "OFF"),
        ]
        # --fresh: an earlier cache names the ninja of a build environment that is gone
        subprocess.check_call(["cmake", "--fresh", "-S", str(ROOT), "-B", str(build), *generator, *options])
        subprocess.check_call(["cmake", "--build", str(build), "--target", "pad"])

    def get_ext_filename(self, fullname: str) -> str:
        # loaded with ctypes, so it has no CPython tag
        *parents, name = fullname.split(".")
        return str(Path(*parents, f"{name}.so"))

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class PlatformWheel(bdist_wheel):
    """One wheel per platform serves every CPython, as nothing links libpython; without libpad, every platform."""

    def get_tag(self) -> tuple[str, str, str]:
        built = bool(self.get_finalized_command("build_ext").get_outputs())
        return "py3", "none", super().get_tag()[2] if built else "any"


FOLDERS = package_folders()
setup(
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"pad_engine": ["py.typed"], "pad_engine.kernels": ["configs/*.json"]},
    # optional: a library that could not be built is not an error when copying it
    ext_modules=[Extension("pad_engine.libpad", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
