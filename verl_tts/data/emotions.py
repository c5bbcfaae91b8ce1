"""An emotion's name, and what is said with it: the instruction to the policy and the text that CLAP compares with.

The names are the 40 folders of laion/voice-acting-prompts, which are those of LAION's Empathic-Insight scorers. The
words are ours. A row keeps the phrase in ``extra_info.emotion``, which the scorer ``clap`` puts into its template, and
the sentence in ``extra_info.instruction``.
"""

from verl_tts.errors import DataError

# Name to a phrase that follows "with" and "a voice full of".
PHRASES = {
    "affection": "warm affection",
    "amusement": "amusement and suppressed laughter",
    "anger": "open anger",
    "astonishment_surprise": "astonishment and surprise",
    "awe": "quiet awe",
    "bitterness": "bitterness",
    "concentration": "deep concentration",
    "confusion": "confusion",
    "contemplation": "thoughtful contemplation",
    "contempt": "cold contempt",
    "contentment": "calm contentment",
    "disappointment": "disappointment",
    "disgust": "disgust",
    "distress": "acute distress",
    "doubt": "doubt and hesitation",
    "elation": "elation",
    "embarrassment": "embarrassment",
    "emotional_numbness": "emotional numbness",
    "fatigue_exhaustion": "fatigue and exhaustion",
    "fear": "fear",
    "helplessness": "helplessness",
    "hope_enthusiasm_optimism": "hope and enthusiasm",
    "impatience_irritability": "impatience and irritability",
    "infatuation": "infatuation",
    "interest": "keen interest",
    "intoxication_altered_states_of_consciousness": "slurred intoxication",
    "jealousy_envy": "jealousy and envy",
    "longing": "longing",
    "malevolence_malice": "malice",
    "pain": "physical pain",
    "pleasure_ecstasy": "pleasure and ecstasy",
    "pride": "pride",
    "relief": "relief",
    "sadness": "deep sadness",
    "sexual_lust": "desire",
    "shame": "shame",
    "sourness": "sourness",
    "teasing": "playful teasing",
    "thankfulness_gratitude": "gratitude",
    "triumph": "triumph",
}
# Folders that are called otherwise than the scorers.
ALIASES = {
    "hope_optimism": "hope_enthusiasm_optimism",
    "intoxication_altered_states": "intoxication_altered_states_of_consciousness",
}


def canonical(emotion: str) -> str | None:
    """``canonical("Jealousy_&_Envy") == canonical("jealousy and envy") == "jealousy_envy"``; None: not one of them."""
    letters = "".join(letter if letter.isalpha() else " " for letter in emotion.casefold())
    name = "_".join(word for word in letters.split() if word != "and")
    name = ALIASES.get(name, name)
    return name if name in PHRASES else None


def phrase(emotion: str) -> str:
    """What the CLAP scorer's template is filled with. Raises ``DataError`` for a name that is none of the 40."""
    name = canonical(emotion)
    if name is None:
        raise DataError(f"the emotion {emotion!r} is unknown; there are: {', '.join(PHRASES)}")
    return PHRASES[name]


def instruction(emotion: str) -> str:
    """``instruction("Relief") == "Speak with relief, clearly, in a high quality recording."`` Raises as ``phrase``."""
    return f"Speak with {phrase(emotion)}, clearly, in a high quality recording."
