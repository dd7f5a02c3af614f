"""Copies the headers that SGLang's host-device kernels need, and builds them into one library.

    python benchmarks/gpu/collect_peer.py .peers/0.5.23 TVM_FFI .peers/kernels

``.peers/0.5.23`` is what `make peers` unpacked; ``TVM_FFI`` the ``include`` folder of the package
``apache-tvm-ffi``, whose headers SGLang's include. About 0.7 MB of headers go into the last folder,
which git ignores; ``build`` makes ``peer.so`` of it where there is an ``nvcc``, on a card's machine
say.
"""

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("peer_kernels.cu")
FLAGS = [
    "nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-O3", "-DSGL_CUDA_ARCH=900",
    "-gencode=arch=compute_90a,code=sm_90a",
]  # fmt: skip


def collect(release: Path, tvm_ffi: Path, target: Path) -> None:
    """Copy every header that the source includes, as the compiler lists them."""
    kernels = release / "sglang" / "kernels" / "jit"
    roots = [kernels / "include", kernels / "csrc", tvm_ffi]
    includes = [f"-I{root}" for root in roots]
    listed = subprocess.run(
        [*FLAGS, *includes, "-M", str(SOURCE)], check=True, capture_output=True, text=True
    ).stdout
    for word in listed.replace("\\\n", " ").split():
        for root in roots:
            if Path(word).is_relative_to(root):
                copy = target / "include" / Path(word).relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, copy)


def build(target: Path) -> Path:
    """The library made of the collected headers; built once."""
    library = target / "peer.so"
    if not library.exists():
        command = [*FLAGS, f"-I{target / 'include'}", "-shared", "-Xcompiler", "-fPIC"]
        subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


if __name__ == "__main__":
    collect(*(Path(argument).resolve() for argument in sys.argv[1:]))
