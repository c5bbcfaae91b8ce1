# Sourced by train.sh and evaluate.sh of each recipe: what a run needs to be there, and what it was. python is the Python.

require() { # a path, and where it comes from
  [[ -e "$1" ]] || { echo "$(basename "$0"): there is no $1: $2" >&2; exit 2; }
}

newest_checkpoint() { # of a run directory; nothing without any
  ls -d "$1"/checkpoints/global_step_* 2>/dev/null | sort -V | tail -n 1 || true
}

# Writes the settings that the newest attempt of a checkpoint's run had into FILE, and prints three of them, a line each:
# the model that it began with, the adapter that it went on from (empty: none), the prompts that it was validated with (empty:
# several files).
settings_of_run() { # checkpoint, FILE
  "$python" - "$(basename "$0")" "$@" <<'PYTHON'
import sys
from pathlib import Path

from omegaconf import OmegaConf

from verl_tts.config.inputs import data_files
from verl_tts.errors import TTSError
from verl_tts.report.run_dir import RunDir

script, checkpoint, file = sys.argv[1:]
try:
    config = RunDir(Path(checkpoint).absolute().parents[1]).latest_config()
except TTSError as error:
    print(f"{script}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
OmegaConf.save(config, file)
model = config.actor_rollout_ref.model
prompts = data_files(config.data.val_files)
print(model.path, model.lora_adapter_path or "", prompts[0] if len(prompts) == 1 else "", sep="\n")
PYTHON
}
