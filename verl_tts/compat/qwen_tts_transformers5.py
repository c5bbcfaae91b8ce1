"""Runs qwen-tts, written for Transformers 4.57, under Transformers 5.9.

Upstream reason: qwen-tts 0.1.1 pins transformers==4.57.3, verl 0.9.1 and vLLM 0.24.0 want 5.x. Affected:
qwen-tts 0.1.1 with transformers 5.0 to 5.10. Measured equal to 4.57.3, bit for bit: logits, gradients, codec,
sampled audio. Qwen's own port, pull request 360 of QwenLM/Qwen3-TTS (commit
00969daa8064e23adc9e5f52cdf20cf247f94159, unreleased, for transformers 5.15), makes the import and the forward
work and leaves loading and saving as they are: with it, those fixes are still needed on 5.9 and the others
change nothing.

Nothing in transformers stays patched: one name is replaced while qwen_tts is being imported and put back;
everything else is bound inside qwen_tts modules or set on qwen_tts classes. Three of the breaks are silent:
without ``keep_loaded_weights`` the model trains from random weights, without ``restore_rope_after_loading``
its positions are uninitialised memory, without ``encode_with_full_attention`` audio longer than 10 s encodes
to other codes.

To be called before anything imports qwen_tts:

    qwen_tts_transformers5.apply()
"""

import copy
import functools
import inspect
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, NamedTuple


class QwenTTS(NamedTuple):
    """The three modules of qwen-tts that need changes."""

    configuration: Any
    talker: Any
    codec: Any


def apply() -> None:
    """Makes ``import qwen_tts`` and what follows work. A second call changes nothing."""
    qwen_tts = import_modules()
    if qwen_tts.codec.ROPE_INIT_FUNCTIONS.get("default") is default_rope:
        return
    for fix in FIXES:
        fix(qwen_tts)


def import_modules() -> QwenTTS:
    """``@check_model_inputs()`` was a decorator factory; it is a plain decorator now. The only import-time break."""
    from transformers.utils import generic

    plain = generic.check_model_inputs

    def check_model_inputs(function: Callable | None = None) -> Callable:
        return generic.merge_with_config_defaults if function is None else plain(function)

    generic.check_model_inputs = check_model_inputs
    try:
        # Transformers prints an "[ERROR]" for an argument of qwen-tts's that its docstrings leave out.
        with redirect_stdout(io.StringIO()):
            from qwen_tts.core.models import configuration_qwen3_tts, modeling_qwen3_tts
            from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2
    finally:
        generic.check_model_inputs = plain
    return QwenTTS(configuration_qwen3_tts, modeling_qwen3_tts, modeling_qwen3_tts_tokenizer_v2)


def add_default_rope(qwen_tts: QwenTTS) -> None:
    """``ROPE_INIT_FUNCTIONS`` lost its entry for plain RoPE: the two modules get a table of their own."""
    for module in (qwen_tts.talker, qwen_tts.codec):
        module.ROPE_INIT_FUNCTIONS = {**module.ROPE_INIT_FUNCTIONS, "default": default_rope}


def default_rope(config: Any, device: Any = None, seq_len: int | None = None) -> tuple[Any, float]:
    """Inverse frequencies of plain RoPE, rounded as Transformers 4.57 rounded them; no attention scaling."""
    import torch

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / head_dim
    return 1.0 / (config.rope_theta**exponents), 1.0


def add_config_defaults(qwen_tts: QwenTTS) -> None:
    """Attributes that the base config no longer has: read by module constructors, and by verl's FSDP engine."""
    qwen_tts.configuration.Qwen3TTSTalkerConfig.pad_token_id = None
    qwen_tts.configuration.Qwen3TTSTalkerCodePredictorConfig.pad_token_id = None
    qwen_tts.configuration.Qwen3TTSConfig.tie_word_embeddings = False


def rename_mask_arguments(qwen_tts: QwenTTS) -> None:
    """The mask functions call ``input_embeds`` ``inputs_embeds`` now and work ``cache_position`` out themselves."""

    def adapted(create_mask: Callable) -> Callable:
        @functools.wraps(create_mask)
        def call(*args: Any, input_embeds: Any = None, cache_position: Any = None, **kwargs: Any) -> Any:
            if input_embeds is not None:
                kwargs["inputs_embeds"] = input_embeds
            return create_mask(*args, **kwargs)

        return call

    for module in (qwen_tts.talker, qwen_tts.codec):
        for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
            setattr(module, name, adapted(getattr(module, name)))


def keep_loaded_weights(qwen_tts: QwenTTS) -> None:
    """Transformers 5 runs ``_init_weights`` on every module after loading and relies on it to spare loaded tensors.

    qwen-tts writes ``weight.data`` in place, which spares nothing. Counting as remote code makes Transformers
    skip modules whose tensors were all loaded, and makes ``generate`` pass ``cache_position`` as 4.57 did.
    """
    for base in (qwen_tts.talker.Qwen3TTSPreTrainedModel, qwen_tts.talker.Qwen3TTSTalkerTextPreTrainedModel):
        base.is_remote_code = classmethod(lambda cls: True)


def restore_rope_after_loading(qwen_tts: QwenTTS) -> None:
    """Loading builds on the meta device and fills non-persistent buffers with uninitialised memory.

    Transformers repairs the rotary buffers of its own models only. Set on the base class of the talker, this
    reaches subclasses that have a loader of their own.
    """
    for cls in (qwen_tts.talker.Qwen3TTSPreTrainedModel, qwen_tts.codec.Qwen3TTSTokenizerV2Model):
        cls.from_pretrained = classmethod(restoring(cls.from_pretrained.__func__))


def restoring(load: Callable) -> Callable:
    @functools.wraps(load)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        loaded = load(cls, *args, **kwargs)  # a pair with output_loading_info=True
        restore_rope(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    return from_pretrained


def restore_rope(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "rope_init_fn") and hasattr(module, "original_inv_freq"):
            inv_freq, module.attention_scaling = module.rope_init_fn(module.config)
            module.inv_freq = inv_freq.to(module.inv_freq.device)  # float32 whatever the dtype of the model
            module.original_inv_freq = module.inv_freq


def encode_with_full_attention(qwen_tts: QwenTTS) -> None:
    """Mimi's transformer has a sliding window of 250 positions (10 s) now; the codec was trained without."""
    encoder = qwen_tts.codec.Qwen3TTSTokenizerV2Encoder
    build = encoder.__init__

    @functools.wraps(build)
    def __init__(self: Any, config: Any) -> None:  # noqa: N807
        build(self, config)
        transformer = self.encoder_transformer
        transformer.config = copy.copy(transformer.config)  # the encoder's own config is what gets saved
        transformer.config.sliding_window = transformer.config.max_position_embeddings

    encoder.__init__ = __init__


def untie_weights(qwen_tts: QwenTTS) -> None:
    """``_tied_weights_keys`` is a dictionary now; the old lists name a module that does not exist."""
    qwen_tts.talker.Qwen3TTSTalkerForConditionalGeneration._tied_weights_keys = None
    qwen_tts.talker.Qwen3TTSTalkerCodePredictorModelForConditionalGeneration._tied_weights_keys = None


def save_rope_scaling(qwen_tts: QwenTTS) -> None:
    """``rope_scaling`` is saved as ``rope_parameters``, which qwen-tts cannot read back."""

    def with_rope_scaling(to_dict: Callable) -> Callable:
        @functools.wraps(to_dict)
        def call(self: Any) -> dict[str, Any]:
            saved = to_dict(self)
            rope = saved.pop("rope_parameters", None) or {}
            rope = {key: value for key, value in rope.items() if key != "rope_theta"}
            saved["rope_scaling"] = rope if set(rope) - {"rope_type"} else None
            return saved

        return call

    configuration = qwen_tts.configuration
    for config in (configuration.Qwen3TTSTalkerConfig, configuration.Qwen3TTSTalkerCodePredictorConfig):
        config.to_dict = with_rope_scaling(config.to_dict)


def save_speaker_encoder_config(qwen_tts: QwenTTS) -> None:
    """This config never calls ``super().__init__``: once loading has set a dtype on it, saving it fails.

    On 4.57 too. It saves what its constructor takes; the caller expects (and removes) the version.
    """
    from transformers import __version__

    config = qwen_tts.configuration.Qwen3TTSSpeakerEncoderConfig
    fields = [name for name in inspect.signature(config.__init__).parameters if name != "self"]
    config.to_dict = lambda self: {name: getattr(self, name) for name in fields} | {"transformers_version": __version__}


FIXES: tuple[Callable[[QwenTTS], None], ...] = (
    add_default_rope,
    add_config_defaults,
    rename_mask_arguments,
    keep_loaded_weights,
    restore_rope_after_loading,
    encode_with_full_attention,
    untie_weights,
    save_rope_scaling,
    save_speaker_encoder_config,
)
