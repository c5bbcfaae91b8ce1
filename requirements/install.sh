#!/usr/bin/env bash
# Fills .venv with the locked requirements: install.sh [PLATFORM] [PYTHON], as `make setup` calls it.
#   PLATFORM  cpu or cuda            default: as .venv is now, else cpu
#   PYTHON    3.11, 3.12 or a path   default: as .venv is now, else 3.11, else 3.12
# Where .venv is up to date already nothing happens. Package indexes are whatever pip and uv are configured for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV UV_PROJECT_ENVIRONMENT

UV_VERSION=0.13.9 # the one that wrote the lock files; an older one on PATH does as well
STAMP=.venv/installed # "PLATFORM PYTHON HASH" of the last complete installation

fail() {
  echo "make setup: $*" >&2
  exit 2
}

# Prints a Python of version $1, as a path. pyenv's are looked for too: its shims only run the selected versions.
find_python() {
  local candidate
  for candidate in "python$1" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python3; do
    "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null || continue
    command -v "$candidate"
    return
  done
  return 1
}

# Puts the path of uv into $uv, and uv into .tools/ where it is missing.
find_uv() {
  uv=.tools/bin/uv
  "$uv" --version >/dev/null 2>&1 && return
  uv=$(command -v uv) && "$uv" --version >/dev/null 2>&1 && return
  uv=.tools/bin/uv
  echo "make setup: installing uv $UV_VERSION into .tools/"
  rm -rf .tools
  # A distribution may have split `venv` off its Python (Debian: python3-venv); pip alone can do it, too.
  if "$1" -c 'import ensurepip, venv' 2>/dev/null; then
    "$1" -m venv .tools
    .tools/bin/pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
  elif "$1" -m pip --version >/dev/null 2>&1; then
    "$1" -m pip install --quiet --disable-pip-version-check --target .tools "uv==$UV_VERSION"
  else
    fail "$1 has neither venv nor pip, so uv cannot be installed; install python3-venv, or uv"
  fi
}

read -r had_platform had_python had_hash 2>/dev/null <"$STAMP" || had_platform='' had_python='' had_hash=''
platform=${1:-${had_platform:-cpu}}
[[ $platform == cpu || $platform == cuda ]] || fail "PLATFORM=$platform is unknown; use cpu or cuda"
requirements=requirements/${platform/cuda/gpu}.txt

version=${2:-$had_python}
case $version in
  '')
    python=$(find_python 3.11) || python=$(find_python 3.12) || python=''
    ;;
  3.11 | 3.12)
    python=$(find_python "$version") || python=''
    ;;
  *)
    python=$(command -v "$version") || fail "PYTHON=$version is neither 3.11, 3.12 nor a program"
    ;;
esac
if [[ -n $python ]]; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "PYTHON=$python does not run as a Python; 3.11 or 3.12 is needed"
  [[ $version == 3.11 || $version == 3.12 ]] || fail "PYTHON=$python is Python $version; 3.11 or 3.12 is needed"
fi
version=${version:-3.11}

hash=$(cat requirements/*.* requirements/vllm_cpu_stub/pyproject.toml pyproject.toml Makefile | sha256sum | cut -c 1-16)
[[ "$had_platform $had_python $had_hash" != "$platform $version $hash" ]] || exit 0

find_uv "${python:-python3}"
export UV_PYTHON=.venv/bin/python
if [[ $had_python != "$version" ]]; then
  # uv fetches a Python of its own only where none was found.
  UV_PYTHON='' "$uv" venv --quiet --clear --python "${python:-$version}" .venv
fi
rm -f "$STAMP"

echo "make setup: $requirements on Python $version"
# Without byte code every process of a run compiles what it imports: a start takes three times as long.
"$uv" pip sync --quiet --require-hashes --compile-bytecode "$requirements"
from_here=("$uv" pip install --quiet --no-deps --no-build-isolation --compile-bytecode)
if [[ $platform == cpu ]]; then
  "${from_here[@]}" requirements/vllm_cpu_stub
fi
"${from_here[@]}" --editable .

echo "make setup: importing what matters"
.venv/bin/python requirements/check_imports.py
command -v sox >/dev/null || echo "make setup: note: no sox program here. qwen-tts says so when it is imported; nothing here uses it."
echo "$platform $version $hash" >"$STAMP"
echo "make setup: done"
