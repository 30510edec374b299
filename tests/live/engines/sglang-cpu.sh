#!/bin/sh
# A real SGLang on the CPU, serving SmolLM2-135M-Instruct: OpenAI API on 127.0.0.1:${PORT:-30000}, model `my-policy`, no key.
#   sglang-cpu.sh install   virtual environment under ${DIR:-$HOME/.cache/capture-sglang}; weights come from vllm-cpu.sh's install
#   sglang-cpu.sh serve …   runs in the foreground; ready when GET /health answers; further arguments go to the server
# SGLang's GPU kernels are absent here: sglang_cpu_stubs.py stands in for them at import, torch computes. Slow, exact enough for shapes.
# Needs Python 3.11 and pip. Everything comes from PyPI.
set -eu
DIR=${DIR:-$HOME/.cache/capture-sglang}
MODEL=${MODEL:-$HOME/.cache/capture-vllm/model}
VERSION=${SGLANG_VERSION:-0.5.23}
here=$(cd "$(dirname "$0")" && pwd)

install() {
    mkdir -p "$DIR"
    python3 -m venv "$DIR/venv"
    pip="$DIR/venv/bin/pip"
    "$pip" install -q --upgrade pip
    "$pip" install -q "torch==2.13.0"
    "$pip" install -q -r "$here/sglang-requirements.txt"
    "$pip" install -q --no-deps "sglang==$VERSION"
    site=$("$DIR/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    cp "$here/sglang_cpu_stubs.py" "$site/sitecustomize.py"
}

serve() {
    # torch's threads spin while they wait for each other: beside other work two are many times slower than one
    export HF_HUB_OFFLINE=1 SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec "$DIR/venv/bin/python" -m sglang.launch_server --model-path "$MODEL" --served-model-name my-policy \
        --host 127.0.0.1 --port "${PORT:-30000}" --device cpu --attention-backend torch_native --sampling-backend pytorch \
        --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup --dtype float32 --mem-fraction-static 0.3 \
        --max-total-tokens 16384 --context-length 4096 --tool-call-parser qwen25 --chat-template "$here/../../../sandbox/tools_template.jinja" "$@"
}

command=${1:?install or serve}
shift
"$command" "$@"
