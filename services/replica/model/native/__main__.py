"""`python -m services.replica.model.native`: build the kernels, one library per instruction set, side by side.

Without a compiler it says so and succeeds: Chorus then runs on plain torch.
"""

import os
import platform
import shutil
import subprocess
import sys

from services.replica.model.native.kernels import BUILT, COMMON_FLAGS, SOURCE, VARIANTS, Variant

BUILD_S = 300.0


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++", "clang++"))), None)


def start(compiler: str, variant: Variant) -> subprocess.Popen[str]:
    """Compile to a name of its own; the library appears whole or not at all."""
    part = variant.library.with_suffix(f".{os.getpid()}.part")
    command = [compiler, *COMMON_FLAGS, *variant.compile_flags, str(SOURCE), "-o", str(part)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own command


def finish(variant: Variant, process: subprocess.Popen[str]) -> bool:
    part = variant.library.with_suffix(f".{os.getpid()}.part")
    _, errors = process.communicate(timeout=BUILD_S)
    if process.returncode == 0:
        part.replace(variant.library)
        return True
    part.unlink(missing_ok=True)
    last = errors.strip().splitlines()[-1:] or ["no reason given"]
    sys.stderr.write(f"the {variant.name} kernels were not built: {last[0]}\n")
    return False


def main() -> int:
    """0 also when nothing could be built: the fallback works."""
    compiler = find_compiler()
    if compiler is None:
        sys.stderr.write("no C++ compiler: the engine will run on plain torch. Install g++ and build again.\n")
        return 0
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    wanted = [variant for variant in VARIANTS if (on_x86 or not variant.compile_flags) and not variant.library.exists()]
    BUILT.mkdir(exist_ok=True)
    if wanted:
        sys.stdout.write("compiling the native kernels: a minute or two, once\n")
        sys.stdout.flush()
    running = [(variant, start(compiler, variant)) for variant in wanted]
    built = [variant.name for variant, process in running if finish(variant, process)]
    current = {variant.library for variant in VARIANTS}
    for old in set(BUILT.glob("*.so")) - current:  # a running engine keeps the file it has
        old.unlink(missing_ok=True)
    if built:
        sys.stdout.write(f"native kernels built: {', '.join(built)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
