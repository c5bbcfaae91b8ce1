#!/usr/bin/env bash
# All that train.sh needs, into WORK (outputs/moss): models and prompts. What is there already is left alone.
#   EMOLIA_DIR=/data/emolia bash recipes/moss_voice_generator/prepare.sh
# EMOLIA_DIR  folder with one folder of recordings a speaker, which is yours to use: CLUSTER/UTTERANCE.wav
# SHARDS      folder with the corpus, instead of the hub
# REVISIONS   file with lines NAME REVISION of the repositories below; default: main, written to WORK/revisions as found
# Words after the script's name go to data_process/voice_acting_prompts.py.
set -euo pipefail

[[ -n "${EMOLIA_DIR:-}" ]] || { echo "prepare.sh: set EMOLIA_DIR to a folder with one folder of recordings a speaker" >&2; exit 2; }
[[ -d "$EMOLIA_DIR" ]] || { echo "prepare.sh: EMOLIA_DIR=$EMOLIA_DIR is no folder" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON_BIN:-python3}
work=${WORK:-outputs/moss}
mkdir -p "$work"

revision() { # of a repository
  [[ -z "${REVISIONS:-}" ]] || awk -v name="$1" '$1 == name {print $2; exit}' "$REVISIONS"
}
download() { # repository, folder; goes on where it was cut off
  local at
  at=$(revision "$1")
  "$python" "$root/recipes/download.py" "$1" "${at:-main}" "$2"
}

download OpenMOSS-Team/MOSS-VoiceGenerator "$work/model"
download OpenMOSS-Team/MOSS-Audio-Tokenizer "$work/codec"
download laion/larger_clap_music_and_speech "$work/clap"
download speechbrain/spkrec-ecapa-voxceleb "$work/ecapa"
download openai/whisper-large-v3-turbo "$work/asr"

[[ -e "$work/emolia" ]] || ln -s "$(cd "$EMOLIA_DIR" && pwd)" "$work/emolia"
[[ -e "$work/data" ]] ||
  "$python" "$root/data_process/voice_acting_prompts.py" --out "$work/data" --references "$EMOLIA_DIR" \
    ${SHARDS:+--shards "$SHARDS"} "$@"
"$python" -m verl_tts.commands check-data "$work/data/train.parquet" "$work/data/validation.parquet"
