"""From the words of `fluxray tune` to a sweep, and from a sweep to its winner's profile. Light: neither Ray nor torch."""

from collections.abc import Sequence
from pathlib import Path

from fluxray.config.keys import nested
from fluxray.config.load import merge
from fluxray.config.space import Space, read_space
from fluxray.config.text import Tree, dump, parse_word
from fluxray.config.trials import base_tree, trial_config
from fluxray.errors import ConfigError
from fluxray.runtime.paths import Home, home
from fluxray.runtime.sweep_shown import keys_words
from fluxray.runtime.sweep_table import read_table
from fluxray.runtime.sweeps import Sweep, new_sweep, open_sweep, refuse_changes


def begin(words: Sequence[str], profile: str | None, model: str | None, samples: int | None, resume: str | None) -> Sweep:
    """Return the sweep that is to start, or to go on. `words` are the file of a space, if any, and keys. Raises ConfigError."""
    files = [word for word in words if "=" not in word]
    given = [word for word in words if "=" in word]
    if len(files) > 1:
        raise ConfigError(f"SPACE: {files[1]!r} is a second file beside {files[0]}; name one, and keys as key=value")
    if resume is None:
        if not files:
            raise ConfigError("SPACE: missing; name a file such as tune_spaces/asha.yaml, or --resume NAME")
        space = _space(files[0], samples)
        return new_sweep(space, base_tree(space, profile, model, given), Path(files[0]).stem)
    begun = open_sweep(resume, home(_storage(given)))
    rest = [word for word in given if parse_word(word)[0] not in ("name", "storage")]
    if files or samples is not None or profile is not None or model is not None or rest:
        refuse_changes(begun, _again(begun, files, (profile, model), samples, rest))
    return begun


def best_profile(name: str, where: Home) -> str:
    """Return the keys that the best trial of a sweep was given, as the text of a profile. Raises ConfigError."""
    sweep = open_sweep(name, where)
    table = read_table(sweep.folder)
    winner = table.winner
    if winner is None:
        raise ConfigError(f"NAME: no trial of {name} has ended; `fluxray tune --resume {name}` goes on with it")
    config = trial_config(sweep.space, sweep.base, winner.keys)
    tree: Tree = dict(sweep.base)
    found = {**winner.keys, "train.num_steps": config.train.num_steps, "optim.warmup_steps": config.optim.warmup_steps}
    for key, value in found.items():
        tree = merge(tree, nested(key, value))
    head = [
        f"# The best of {len(table.trials)} trials of sweep {name}: trial {winner.trial}, run {winner.run}.",
        f"# {table.head.metric} {winner.value:.6g} after {winner.history[-1].step} steps; {table.head.budget}.",
        f"# {keys_words(winner.keys)}",
    ]
    return "\n".join([*head, dump(tree)])


def _space(file: str, samples: int | None) -> Space:
    space = read_space(Path(file).expanduser())
    if samples is None:
        return space
    if space.search == "grid":
        raise ConfigError(f"--samples: {samples} has no effect with search grid; drop it")
    return space.model_copy(update={"samples": samples})


def _again(
    begun: Sweep, files: Sequence[str], names: tuple[str | None, str | None], samples: int | None, words: Sequence[str]
) -> Sweep:
    """Return the sweep that the words would start, what they leave away being as it was begun."""
    space = _space(files[0], None) if files else begun.space
    wanted = samples if samples is not None else begun.space.samples
    space = space.model_copy(update={"samples": wanted if space.search != "grid" else None})
    tree = base_tree(space, *names, words) if any(names) else merge(begun.base, base_tree(space, None, None, words))
    common = {key: value for key, value in tree.items() if key not in ("name", "storage")}
    return Sweep(begun.name, begun.home, space, common, resumed=True)


def _storage(words: Sequence[str]) -> str | None:
    return next((str(value) for key, value in map(parse_word, words) if key == "storage"), None)
