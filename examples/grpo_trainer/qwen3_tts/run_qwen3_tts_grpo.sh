#!/usr/bin/env bash
# GRPO on a Qwen3-TTS Base model: the published recipe. Everything after the script's name is an override, e.g.
#   MODEL_PATH=... TRAIN_FILE=... VAL_FILE=... SPK_EMBED_PATH=... SCORER_URL=http://HOST:PORT/score \
#     bash run_qwen3_tts_grpo.sh actor_rollout_ref.actor.optim.lr=5e-6
# SCORER_URL=null goes with a Python function in place of a server: reward.custom_reward_function.path=FILE.
# COMMAND=doctor looks at all of it and trains nothing, COMMAND=screen lets the starting policy speak and be scored.
# NUM_GPUS are those of one node. On a machine without any, tts.platform=cpu is found and NUM_GPUS are processes.
set -euo pipefail

for name in MODEL_PATH TRAIN_FILE VAL_FILE SPK_EMBED_PATH SCORER_URL; do
  [[ -n "${!name:-}" ]] || { echo "$(basename "$0"): set $name" >&2; exit 2; }
done

python=${PYTHON_BIN:-python3}
"$python" -c "import verl_tts, hydra" 2>/dev/null || { echo "$(basename "$0"): no verl_tts in $python: set PYTHON_BIN" >&2; exit 2; }

case "${COMMAND:-train}" in
  train) program=(verl_tts.main_omni) ;;
  doctor | screen) program=(verl_tts.commands "$COMMAND") ;;
  *) echo "$(basename "$0"): COMMAND=$COMMAND has to be train, doctor or screen" >&2; exit 2 ;;
esac

# A value as the grammar of overrides reads it, whatever it holds; null stays null.
quoted() { if [[ "$1" == null ]]; then echo null; else echo "'${1//\'/\\\'}'"; fi; }

exec "$python" -m "${program[@]}" \
  actor_rollout_ref.model.path="$(quoted "$MODEL_PATH")" \
  data.train_files="$(quoted "$TRAIN_FILE")" \
  data.val_files="$(quoted "$VAL_FILE")" \
  tts.speaker_path="$(quoted "$SPK_EMBED_PATH")" \
  tts.reward.scorer_url="$(quoted "$SCORER_URL")" \
  tts.output_dir="$(quoted "${OUTPUT_DIR:-outputs/qwen3_tts_grpo}")" \
  data.seed="${SEED:-42}" \
  data.train_batch_size=4 \
  data.val_max_samples=100 \
  data.max_response_length=360 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.actor.optim.lr=1.0e-6 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.actor.kl_loss_coef=0.12 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  trainer.experiment_name=qwen3_tts_0_6b_audio_reward \
  trainer.nnodes="${NNODES:-1}" \
  trainer.n_gpus_per_node="${NUM_GPUS:-2}" \
  trainer.total_training_steps="${TOTAL_TRAINING_STEPS:-500}" \
  trainer.test_freq="${TEST_FREQ:-20}" \
  trainer.save_freq="${SAVE_FREQ:-20}" \
  trainer.resume_mode="${RESUME_MODE:-auto}" \
  trainer.max_actor_ckpt_to_keep=26 \
  "$@"
