#!/bin/sh
# Trainers for `make live`, each in a virtual environment of its own under ${DIR:-$HOME/.cache/capture-trainers}, from PyPI:
#   trainers.sh install [trl verl skyrl openenv]   all of them without a name; about 1.5 GB each, once
# Needs Python 3.11 and pip. No GPU: torch is used on the CPU, verl and SkyRL only for their data sets.
set -eu
DIR=${DIR:-$HOME/.cache/capture-trainers}
root=$(cd "$(dirname "$0")/../.." && pwd)
TORCH="torch==2.13.0"

install() {
    venv="$DIR/$1"
    if [ -e "$venv/.installed" ]; then return; fi
    python3 -m venv "$venv"
    pip="$venv/bin/pip"
    "$pip" install -q --upgrade pip
    case $1 in
        trl) "$pip" install -q "$TORCH" trl datasets accelerate -e "$root" ;;
        # verl asks for a server stack that its data set does not use
        verl) "$pip" install -q "$TORCH" "transformers<5.11" datasets pandas pyarrow omegaconf hydra-core "tensordict<=0.10" codetiming numpy ray pillow torchdata
            "$pip" install -q --no-deps verl ;;
        skyrl) "$pip" install -q "$TORCH" "transformers>=5.6.1,<5.9" datasets omegaconf loguru
            "$pip" install -q --no-deps skyrl ;;
        openenv) "$pip" install -q openenv datasets ;;
        *) echo "no trainer $1: trl, verl, skyrl, openenv" >&2; exit 2 ;;
    esac
    touch "$venv/.installed"
}

command=${1:?install}
shift
[ "$command" = install ] || { echo "usage: trainers.sh install [trl verl skyrl openenv]" >&2; exit 2; }
for name in ${*:-trl verl skyrl openenv}; do
    install "$name"
done
