#!/usr/bin/env bash
# The suite in two parts: what starts no run, two files at a time; then the real loop, one start after the other, since
# each wants the machine for itself. Words after the script's name go to pytest, for both parts.
set -uo pipefail

own="not slow and not faults and not gpu and not gpu_engine"
code=0 empty=0
part() {
  local end
  "$PYTHON_BIN" -m pytest "$@"
  end=$?
  case $end in
    0) ;;
    5) empty=$((empty + 1)) ;; # no test of this part was asked for
    *) code=$end ;;
  esac
}
part -n 2 --dist loadfile -m "not loop and $own" "$@"
part -m "loop and $own" "$@"
((empty < 2)) || code=5
exit $code
