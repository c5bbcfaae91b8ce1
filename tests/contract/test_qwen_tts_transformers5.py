"""qwen-tts under Transformers 5: every break is still there, its fix repairs it, transformers stays as it was.

A break that is gone fails its line below: then the fix can go, and in the end the whole shim.

What happens to a process that imports qwen_tts cannot be undone in it, so one child process does all of it,
and each break happens in a fork of that child: the others are fixed, this one is not.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

# break -> (the fix that is left out, what the probe of the same name meets without it)
BREAKS = {
    "import_package": ("import_modules", "TypeError: check_model_inputs()"),
    "build_model": ("add_default_rope", "KeyError: 'default'"),
    "build_model_again": ("add_config_defaults", "AttributeError: 'Qwen3TTSTalkerConfig' object has no attribute 'pad"),
    "read_tying": ("add_config_defaults", "AttributeError: 'Qwen3TTSConfig' object has no attribute 'tie_word_embed"),
    "run_forward": ("rename_mask_arguments", "TypeError: create_causal_mask() got an unexpected keyword argument"),
    "compare_weights": ("keep_loaded_weights", "AssertionError: weights in memory are not those of the file"),
    "sample": (
        "keep_loaded_weights",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),  # all positions at once
    "compare_rope": ("restore_rope_after_loading", "AssertionError: rotary frequencies were never computed"),
    "encode_20_seconds": ("encode_with_full_attention", "AssertionError: the first frame was out of sight"),
    "save_model": ("untie_weights", "AttributeError: 'list' object has no attribute 'keys'"),
    "save_and_reload_config": ("save_rope_scaling", "TypeError: 'NoneType' object is not subscriptable"),
    "save_config": ("save_speaker_encoder_config", "KeyError: 'dtype'"),
}

WATCHED = (
    "configuration_utils",
    "generation.utils",
    "masking_utils",
    "modeling_rope_utils",
    "modeling_utils",
    "models.mimi.modeling_mimi",
    "utils.generic",
)


@pytest.fixture(scope="module")
def report(tiny_checkpoint: Path) -> dict[str, str]:
    command = [sys.executable, __file__, str(tiny_checkpoint)]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", BREAKS)
def test_break_is_still_there_without_its_fix(report: dict[str, str], name: str) -> None:
    assert report[name].startswith(BREAKS[name][1])


@pytest.mark.parametrize("name", BREAKS)
def test_break_is_gone_once_the_shim_is_applied(report: dict[str, str], name: str) -> None:
    assert report[f"{name} with every fix"] == "fine"


def test_every_fix_has_a_break() -> None:
    from verl_tts.compat.qwen_tts_transformers5 import FIXES

    assert {fix.__name__ for fix in FIXES} == {fix for fix, _ in BREAKS.values()} - {"import_modules"}


def test_importing_the_shim_imports_nothing_else(report: dict[str, str]) -> None:
    assert report["imported by importing the shim"] == "[]"


def test_transformers_is_the_same_after_the_shim(report: dict[str, str]) -> None:
    assert report["changed in transformers"] == "[]"


def test_a_second_call_changes_nothing(report: dict[str, str]) -> None:
    assert report["changed by the second call"] == "[]"


# ----------------------------------------------------------------------------------------- in the child process


def main(checkpoint: Path) -> None:
    from verl_tts.compat import qwen_tts_transformers5 as shim

    report = {"imported by importing the shim": str(sorted({"torch", "transformers", "qwen_tts"} & set(sys.modules)))}

    import torch

    modules = [import_module(f"transformers.{name}") for name in WATCHED]

    def snapshot() -> dict[str, object]:
        """Everything in the parts of transformers that the shim is about, by identity; tables by content."""
        seen: dict[str, object] = {}
        for module in modules:
            for name, value in vars(module).items():
                seen[f"{module.__name__}.{name}"] = dict(value) if name == "ROPE_INIT_FUNCTIONS" else value
                if isinstance(value, type):
                    seen.update({f"{module.__name__}.{name}.{k}": v for k, v in vars(value).items()})
        return seen

    before = snapshot()
    report["import_package"] = outcome(import_package)
    qwen_tts = shim.import_modules()
    Talker = qwen_tts.talker.Qwen3TTSForConditionalGeneration
    Codec = qwen_tts.codec.Qwen3TTSTokenizerV2Model

    def load():
        return Talker.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def read_tying() -> None:
        _ = qwen_tts.configuration.Qwen3TTSConfig.from_pretrained(checkpoint).tie_word_embeddings

    def run_forward() -> None:
        load().talker(inputs_embeds=torch.ones(1, 4, 64), attention_mask=torch.ones(1, 4, dtype=torch.long))

    def compare_weights() -> None:
        from safetensors.torch import load_file

        in_memory, in_file = load().state_dict(), load_file(checkpoint / "model.safetensors")
        equal = all(torch.equal(value, in_memory[name]) for name, value in in_file.items())
        assert equal, "weights in memory are not those of the file"

    def sample() -> None:
        load().generate(
            input_ids=[torch.tensor([[3073, 263, 10, 72, 105, 3074, 10, 3073, 263, 10]])],
            languages=["Auto"],
            voice_clone_prompt={
                "ref_code": None,
                "ref_spk_embedding": [torch.ones(64)],
                "x_vector_only_mode": [True],
                "icl_mode": [False],
            },
            max_new_tokens=3,
        )

    def compare_rope() -> None:
        for module in load().modules():
            if hasattr(module, "original_inv_freq"):
                computed = not module.original_inv_freq.is_meta and module.inv_freq[0] == 1
                assert computed, "rotary frequencies were never computed"

    def encode_20_seconds() -> None:
        codec = Codec.from_pretrained(checkpoint / "speech_tokenizer", dtype=torch.float32).eval()
        transformer = codec.encoder.encoder_transformer
        with torch.no_grad():
            positions = torch.randn(1, 500, 32, generator=torch.Generator().manual_seed(0))  # 25 Hz
            seen = transformer(positions)[0][0, -1]
            positions[:, 0] += 100.0
            changed = transformer(positions)[0][0, -1]
        assert not torch.equal(seen, changed), "the first frame was out of sight"

    def save_model() -> None:
        with tempfile.TemporaryDirectory() as folder:
            load().save_pretrained(folder)

    def save_and_reload_config() -> None:
        model = load()
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            config = qwen_tts.configuration.Qwen3TTSConfig.from_pretrained(folder)
        Talker._from_config(config).talker(inputs_embeds=torch.ones(1, 4, 64))

    def save_config() -> None:
        with tempfile.TemporaryDirectory() as folder:
            load().config.save_pretrained(folder)

    probes: dict[str, Callable] = {
        "import_package": import_package,
        "build_model": load,
        "build_model_again": load,
        "read_tying": read_tying,
        "run_forward": run_forward,
        "compare_weights": compare_weights,
        "sample": sample,
        "compare_rope": compare_rope,
        "encode_20_seconds": encode_20_seconds,
        "save_model": save_model,
        "save_and_reload_config": save_and_reload_config,
        "save_config": save_config,
    }
    for name, (left_out, _) in BREAKS.items():
        if name != "import_package":
            others = [fix for fix in shim.FIXES if fix.__name__ != left_out]
            report[name] = outcome(probes[name], lambda others=others: [fix(qwen_tts) for fix in others])

    shim.apply()
    after = snapshot()
    report["changed in transformers"] = str([name for name, value in before.items() if changed(value, after.get(name))])

    patched = {f"{module.__name__}.{k}": v for module in qwen_tts for k, v in vars(module).items()}
    shim.apply()
    again = {f"{module.__name__}.{k}": v for module in qwen_tts for k, v in vars(module).items()}
    report["changed by the second call"] = str([name for name in again if again[name] is not patched[name]])
    for name, probe in probes.items():
        report[f"{name} with every fix"] = outcome(probe)
    print(json.dumps(report))


def changed(before: object, after: object) -> bool:
    return before != after if isinstance(before, dict) else before is not after


def import_package() -> None:
    import qwen_tts  # noqa: F401


def outcome(probe: Callable, prepare: Callable = lambda: None) -> str:
    """What ``probe`` ends in, in a fork: "fine", or the error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            probe()
            said = "fine"
        except Exception as error:  # noqa: BLE001 - any error at all is the finding
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return said


if __name__ == "__main__":
    main(Path(sys.argv[1]))
