"""Build the argparse parser from the schema, and read a command line into entries.

Every setting is a kebab-case flag in the group of its section, with the attribute's docstring as help. slime's own
flags cannot be abbreviated: an unknown flag is an error with a suggestion. Values stay strings here; pydantic converts
them, so that flags, environment and YAML share one set of rules. A command line is read twice: slime's own flags first,
because the parsers of other programs' flags can depend on them (`--engine-python`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, NoReturn

from slime_core.config.flag_parser import FlagParser, OnlyGiven, Switch, as_json, off_names, takes_list, truth, words
from slime_core.config.foreign import ForeignFlags, Lists, renamed
from slime_core.config.settings import FLAG, Entry
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError, did_you_mean

_HELP_HEAD = (
    "Settings come from defaults, then --config files, then SLIME_<NAME> environment variables, then flags;"
    " later ones win. `{prog} --help-all` lists every setting, `slime config show` each value with its origin. Options"
    " of plugins are listed at the end, for the components that the other flags select."
)

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Characters that look like a hyphen; documents often contain them instead of a hyphen."""


_DATA = "config hf_checkpoint prompt_data input_key label_key apply_chat_template"
_SAMPLING = "rollout_temperature rollout_max_response_len custom_generate_function_path rollout_engine"
_TRAINING = "global_batch_size max_tokens_per_gpu lr lr_decay_style train_backend lora_rank"
_REWARD = "rm_type custom_rm_path"

FIRST: Mapping[str, Mapping[str, str]] = {
    "train": {
        "Model and data": f"{_DATA} system_prompt",
        "Rollout": f"num_rollout num_epoch rollout_batch_size n_samples_per_prompt {_SAMPLING}",
        "Reward": _REWARD,
        "Algorithm": "advantage_estimator use_kl_loss kl_loss_coef eps_clip",
        "Training": f"num_steps_per_rollout {_TRAINING}",
        "Machines": "device actor_num_gpus_per_node rollout_num_gpus colocate async_training",
        "Evaluation": "eval_prompt_data eval_interval",
        "Output": "save save_interval load overwrite seed",
    },
    "sft": {
        "Model and data": f"{_DATA} loss_mask_type",
        "Training": f"num_epoch rollout_batch_size {_TRAINING}",
        "Machines": "device actor_num_gpus_per_node",
        "Output": "save save_interval load overwrite seed",
    },
    "rollout": {
        "Model and data": f"{_DATA} system_prompt",
        "Rollout": f"num_rollout rollout_batch_size n_samples_per_prompt {_SAMPLING}",
        "Reward": _REWARD,
        "Output": "run_dir save_debug_rollout_data overwrite seed",
    },
    "eval": {
        "Model and data": "config hf_checkpoint eval_prompt_data eval_config eval_input_key eval_label_key"
        " apply_chat_template system_prompt",
        "Sampling": "n_samples_per_eval_prompt eval_temperature eval_top_p eval_max_response_len"
        " custom_generate_function_path rollout_engine",
        "Reward": f"{_REWARD} eval_answer_path",
        "Output": "run_dir resume overwrite",
    },
}
"""Command -> topic -> settings on the first page of its help; the page of other commands is that of `train`."""


@dataclass
class ParsedFlags:
    """Hold the flags of one command line."""

    values: dict[str, Entry] = field(default_factory=dict)
    foreign: dict[str, Entry] = field(default_factory=dict)
    """Other programs' flags, by attribute."""
    sets: list[str] = field(default_factory=list)
    """Values of `--set`."""
    help_flag: str = ""
    """Flag that prints another program's flags, if it was given."""
    rest: list[str] = field(default_factory=list)
    """Unknown flags and the words that follow them."""


class _FirstPage(argparse.Action):
    """Print the settings that are commonly used with this command (`--help`)."""

    def __call__(self, parser: Any, namespace: object, values: object, option_string: str | None = None) -> NoReturn:
        topics = FIRST.get(parser.prog.split()[-1], FIRST["train"])
        shown = {title: [parser.by_name[name] for name in names.split()] for title, names in topics.items()}
        print(parser.page(shown, parser.usage))
        raise SystemExit(0)


@cache
def _own_flags() -> argparse.ArgumentParser:
    """Return a parser of slime's flags, by section, which every `SettingsParser` shares: there are hundreds."""
    own = argparse.ArgumentParser(add_help=False)
    for section, specs in groupby(flag_specs().values(), lambda spec: spec.section):
        group = own.add_argument_group(section)
        for spec in specs:
            shape: dict[str, Any] = {"metavar": spec.metavar, "default": spec.default}
            if spec.kind == "bool" and not spec.is_list:
                shape |= {"action": Switch, "off": [spec.off_flag] if spec.off_flag else []}
            elif spec.spelling.append:
                shape["action"] = "append"
            elif spec.is_list:
                shape |= {"action": "extend", "nargs": "+"}
            group.add_argument(
                spec.flag,
                *(f"--{name}" for name in spec.spelling.also),
                dest=spec.name,
                help=spec.help.replace("%", "%%"),
                **shape,
            )
    return own


class SettingsParser(FlagParser):
    """The parser of every command that takes the run's settings."""

    def __init__(self, foreign: Sequence[ForeignFlags], *, prog: str = "slime train") -> None:
        """Create the parser with slime's own flags.

        Args:
            foreign: Owners of other programs' flags, for the help texts.
            prog: The command as the user types it.
        """
        super().__init__(
            prog,
            usage=f"{prog} [--config FILE] [flags]",
            description=_HELP_HEAD.format(prog=prog),
            allow_abbrev=True,
            parents=[_own_flags()],
        )
        self.foreign = foreign
        self._abbreviated = set[str]()
        self.add_argument("-h", "--help", action=_FirstPage, nargs=0, help="the first page")
        self.add_argument("--help-all", action="help", help="list every setting")
        (run,) = (group for group in self._action_groups if group.title == "Run")
        run.add_argument(
            "--set",
            action="append",
            metavar="NAME.KEY=VALUE",
            help="Set one entry of a mapping, e.g. plugins.math.tolerance=1e-6; repeatable.",
        )
        for owner in foreign:
            names = [f"--{name}" for name in owner.examples] + [f"--{p}*" for p in owner.prefixes]
            names += [f"(--{owner.help_flag} lists them)"] if owner.help_flag else owner.listed.by_name
            self.add_argument_group(f"{owner.owner} ({owner.users})", " ".join(names))
        for flag in dict.fromkeys(owner.help_flag for owner in foreign if owner.help_flag):
            text = "List the flags of " + " and ".join(o.owner for o in foreign if o.help_flag == flag) + "."
            run.add_argument(f"--{flag}", dest="help_flag", action="store_const", const=flag, help=text)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the only flag with this prefix, of a program whose flags can be abbreviated."""
        found = [each for each in super()._get_option_tuples(option_string) if each[0].dest in self._abbreviated]
        return found[:1] if len({each[0].dest for each in found}) == 1 else []

    def read_own(self, argv: Sequence[str]) -> ParsedFlags:
        """Read slime's own flags. Raises ConfigError; prints help and raises SystemExit on `--help`, `--help-all`."""
        for token in argv:  # a list flag would read a word with a look-alike hyphen as a value
            if token[:1] in _DASHES and "--" + token.partition("=")[0].lstrip(_DASHES) in self._option_string_actions:
                raise ConfigError(self._unknown(token, Lists(self.foreign, {})))
        namespace, rest = self.parse_known_args(argv, OnlyGiven())
        given = vars(namespace)
        parsed = ParsedFlags(sets=given.pop("set", []), help_flag=given.pop("help_flag", ""), rest=rest)
        typed = (token.partition("=")[0] for token in argv)
        named = {self._option_string_actions[word].dest: word for word in typed if word in self._option_string_actions}
        for name, value in given.items():
            (parsed.values if name in flag_specs() else parsed.foreign)[name] = Entry(value, FLAG, named.get(name, ""))
        return parsed

    def read_foreign(self, argv: Sequence[str], lists: Lists, rest: Sequence[str]) -> dict[str, Entry]:
        """Read the flags of other programs. Raises ConfigError, also for an unknown flag.

        Args:
            argv: The command line.
            lists: Other programs' parsers.
            rest: The words that `read_own` did not recognize.
        """
        names = {token.partition("=")[0][2:] for token in rest if token.startswith("--")}
        found = (lists.of(name.replace("-", "_")) for name in names if "_" not in name)
        for theirs in {id(parser): parser for parser in found if parser is not None}.values():
            self._take(theirs)
        parsed = self.read_own(argv) if rest else ParsedFlags()
        if parsed.rest:
            raise ConfigError(self._unknown(parsed.rest[0], lists))
        return parsed.foreign

    def words_of(self, arguments: Mapping[str, object], lists: Lists) -> Iterator[str]:
        """Yield the words of a command line that sets `arguments`: settings by name, and other programs' flags."""
        for name, value in arguments.items():
            parser = self if name in self.by_name else lists.of(name)
            if parser is None or value is None:
                continue
            flag = parser.by_name[name]
            if flag.nargs == 0:
                value = truth(value) != (f"--{name.replace('_', '-')}" in off_names(flag))
            repeated = not takes_list(flag) and flag.type is not as_json
            for each in value if repeated and isinstance(value, list | tuple) else [value]:
                yield from words(flag, each)

    def _take(self, theirs: FlagParser) -> None:
        """Add another program's flags, except for names and attributes that slime already uses."""
        for flag in theirs.flags:
            if flag.dest not in flag_specs() and not self._option_string_actions.keys() & set(flag.option_strings):
                self._add_action(flag)
                if theirs.allow_abbrev:
                    self._abbreviated.add(flag.dest)

    def _unknown(self, token: str, lists: Lists) -> str:
        word = token.partition("=")[0]
        if theirs := renamed(token):
            return f"unknown flag {word}: {theirs}."
        known = [*self._option_string_actions]
        if not token.startswith("-"):
            meant = did_you_mean("--" + word.lstrip(f"{_DASHES}+ "), known, cutoff=0.9)
            if token.endswith((".yaml", ".yml")):
                meant = f" Did you mean --config {token}?"
            return f"unexpected argument {token!r}; every setting is a flag, see `{self.prog} --help-all`.{meant}"
        if listed := lists.of(word[2:].replace("-", "_")):
            return listed.unknown(word, word, [*known, *listed.option_strings])
        known += [option for owner in self.foreign if not owner.prefixes for option in owner.listed.option_strings]
        own = f" `{self.prog} --help-all` lists all; keys of your own go into --custom-config-path."
        return f"unknown flag {word}.{did_you_mean(word, known) or own}"
