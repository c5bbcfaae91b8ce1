"""What `verl-tts doctor` looks at before a run, one file a kind of look.

findings.py   what a look may say
settings.py   the configuration, every mistake in it and not the first alone
machine.py    versions, platform, registration, memory, disk, ports
inputs.py     model, tokenizer, codec, voices, prompt files, scorer
listening.py  the rollout engine: a line synthesised, its log-probs against the actor's
sampling.py   the process that the engine is started in
"""
