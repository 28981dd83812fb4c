"""The architecture numbers of published models, by the names of THUDM/slime's scripts: `--model`, `slime models`.

`data/*.json` has one file per `model_type`; `presets.py` reads them, `numbers.py` and `count.py` say what they amount
to, `megatron_flags.py` spells them as Megatron's flags. Nothing here imports torch or knows a plugin.
"""
