"""``python -m verl_tts.commands``: the console script ``verl-tts`` of this very interpreter."""

import sys

from verl_tts.commands import main

sys.exit(main())
