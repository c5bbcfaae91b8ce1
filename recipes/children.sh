# Sourced by the scorer.sh of each recipe, which sets python: children that end with the script, a scorer among them.

children=()
stop() {
  ((${#children[@]})) || return 0
  kill "${children[@]}" 2>/dev/null || true
  wait "${children[@]}" || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() { echo "$(basename "$0"): $*" >&2; exit 3; }
healthy() { "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$1/healthz" 2>/dev/null; }

await_scorer() { # the pid of `verl-tts score --port 0`, its log, how many seconds it may load; sets SCORER_URL
  local scorer=$1 log=$2 limit_s=$3 address=""
  children+=("$scorer")
  local until=$((SECONDS + limit_s))
  until [[ -n "$address" ]] && healthy "$address"; do
    kill -0 "$scorer" 2>/dev/null || fail "the scorer ended: $(tail -n 1 "$log")"
    ((SECONDS < until)) || fail "the scorer did not answer in $limit_s s, see $log"
    sleep 0.5
    address=$(sed -n 's/.* listening on \(http[^ ]*\).*/\1/p' "$log" | head -n 1) # the port is a free one
  done
  echo "scorer on $address, log $log"
  export SCORER_URL=$address/score
}

# Runs a command as a child, so that a signal to the script reaches it; its exit code is the command's.
attend() {
  "$@" &
  children+=($!)
  wait $!
}
