"""The command line. Nothing heavy is imported before a command needs it."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fluxray.errors import ConfigError, FluxrayError
from fluxray.runtime.imports import end_quickly, quick_imports
from fluxray.runtime.outcome import FAILURE, FailedError, StoppedError, ending

USER_FAULT, STOPPED = 2, 130

app = typer.Typer(
    name="fluxray",
    help="Trains large Flux models, every parameter of them, as a service on a Ray cluster.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Profile = Annotated[str | None, typer.Option(help="Hardware shape: cpu, a6000, fsdp8.", show_default=False)]
Model = Annotated[
    str | None, typer.Option(help="Preset (lm-tiny, neox-20b, flux2-dev, ...), path:DIR or hf:NAME.", show_default=False)
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Configuration keys.", show_default=False)]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder; or MIRROR/RUN.")]
Storage = Annotated[str | None, typer.Option(help="Folder of the runs; default: $FLUXRAY_HOME, ~/.fluxray.", show_default=False)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what Ray and the workers print.")]


@app.command()
def train(overrides: Overrides = None, profile: Profile = None, model: Model = None, verbose: Verbose = False) -> None:
    """Train a model, or go on with the run called name=NAME."""
    from fluxray.config.load import resolve
    from fluxray.runtime.stopping import interrupt_on_sigterm

    interrupt_on_sigterm()
    config = resolve(profile, model, overrides or ())
    with quick_imports():
        from fluxray.runtime.launch import train as launch

    done = launch(config, label=model or "run", verbose=verbose)
    summary = done.summary
    rows = {
        "run": f"{done.name}, finished at step {summary.step}",
        "checkpoint": summary.checkpoint or "none",
        "held-out": summary.held_out,
        "MLflow": _ui_hint(config.storage) if config.tracking.uri is None else done.tracking_uri,
    }
    for name, text in rows.items():
        print(f"{name:<12}{text}")


@app.command()
def encode(overrides: Overrides = None, profile: Profile = None, model: Model = None, verbose: Verbose = False) -> None:
    """Encode the pictures of data.source by the pipeline of model.weights into data.cache, or bring that up to date."""
    from fluxray.config.load import resolve
    from fluxray.runtime.stopping import interrupt_on_sigterm

    interrupt_on_sigterm()
    config = resolve(profile, model, overrides or ())
    with quick_imports():
        from fluxray.runtime.encode import encode_ahead

    print(encode_ahead(config, verbose=verbose).summary())


@app.command("train-images", hidden=True)
def train_images(overrides: Overrides = None) -> None:
    """Do what `make train-images` does: train a small VAE and a tiny FLUX.2 on pictures that libraries bring along."""
    from fluxray.runtime.stopping import interrupt_on_sigterm

    interrupt_on_sigterm()
    with quick_imports():
        from fluxray.runtime.first_images import train_images as run

    run(overrides or ())


@app.command()
def plan(overrides: Overrides = None, profile: Profile = None, model: Model = None) -> None:
    """Print what a run would take of device, host and disk and how fast it would be; exits with 2 if it does not fit."""
    from fluxray.config.load import resolve

    resolved = resolve(profile, model, overrides or ())
    with quick_imports():
        from fluxray.runtime.planning import describe, plan_run, require_fit

    found = plan_run(resolved)
    print("\n".join(describe(resolved, found, model or "model")), flush=True)
    require_fit(resolved, found)


@app.command()
def config(
    overrides: Overrides = None,
    profile: Profile = None,
    model: Model = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print YAML.")] = False,
) -> None:
    """Print the resolved configuration; * marks what is not the default, and the layer it comes from follows."""
    from fluxray.config.keys import schema_fields
    from fluxray.config.load import flatten, origins, resolve, to_yaml
    from fluxray.config.schema import TrainConfig
    from fluxray.runtime.identity import masked

    resolved = resolve(profile, model, overrides or ())
    if yaml:
        print(masked(to_yaml(resolved)), end="")
        return
    flat = flatten(resolved)
    defaults = {key: field.default for key, field in schema_fields().items()} | flatten(TrainConfig())
    sources = origins(profile, model, overrides or ())
    width = max(map(len, flat))
    for key, value in flat.items():
        mark = " " if defaults[key] == value else "*"
        print(f"{mark} {key:<{width}}  {masked(_shown(value))}{f'  ({sources[key]})' if key in sources else ''}")


@app.command()
def evaluate(run: Run, storage: Storage = None, verbose: Verbose = False) -> None:
    """Print the loss of a run's newest checkpoint on its held-out split."""
    from fluxray.runtime.stopping import interrupt_on_sigterm

    interrupt_on_sigterm()
    run_dir = _run_dir(run, storage)
    with quick_imports():
        from fluxray.runtime.launch import evaluate as launch

    summary = launch(run_dir, verbose=verbose)
    print(f"{run_dir.name} at step {summary.step}: {summary.held_out}")


@app.command()
def export(  # noqa: PLR0913, PLR0917 - each is an option
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder, for from_pretrained of transformers or diffusers.")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Numbers that the weights are written as.")] = "fp32",
    form: Annotated[
        Literal["library", "bfl"], typer.Option("--format", help="bfl: one file of a FLUX model, as ComfyUI loads it.")
    ] = "library",
    ema: Annotated[bool, typer.Option("--ema", help="The moving average of the weights (ema.decay).")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Of a run with an adapter the whole model, not the adapter.")] = False,
    storage: Storage = None,
) -> None:
    """Write a run's newest checkpoint as a folder that transformers, diffusers or peft loads."""
    run_dir = _run_dir(run, storage)
    with quick_imports():
        from fluxray.export import export_run

    written = export_run(run_dir, folder.expanduser().absolute(), dtype, form, averaged=ema, merge=merge)
    print(f"exported {run_dir.name} to {written}")


@app.command()
def sample(  # noqa: PLR0913, PLR0917 - the options of one command
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run; or a pipeline: its folder, path:FOLDER or hf:NAME.")],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="May be given several times.")] = None,
    grid: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A prompt a line; or what --embed has written.", show_default=False)
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(metavar="N", help="May be given several times; default: 0.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Denoising steps.")] = 28,
    size: Annotated[str | None, typer.Option(metavar="HxW", help="In pixels; default: that of most training images.")] = None,
    guidance: Annotated[float | None, typer.Option(metavar="G", min=0, help="Default: the pipeline's own.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="By the moving average of the weights (ema.decay).")] = False,
    pipeline: Annotated[
        str | None, typer.Option(metavar="REF", help="path:FOLDER or hf:NAME with VAE and text encoders; default: the run's.")
    ] = None,
    embed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only write the encoded prompts, for sample.embeddings.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the pictures.")] = Path("samples"),
    storage: Storage = None,
) -> None:
    """Draw pictures by the newest checkpoint of a run, or by a published or exported pipeline."""
    with quick_imports():
        from fluxray.runtime import sample as sampling

    reference = sampling.is_pipeline(run)
    if reference is not None and ema:
        raise ConfigError(f"--ema: {run} is a pipeline, which keeps no average; drop it")
    wish = sampling.Wish(tuple(dict.fromkeys(seed or (0,))), steps, sampling.parse_size(size), guidance)
    if reference is not None:
        origin = sampling.of_pipeline(reference, pipeline)
    else:
        origin = sampling.of_run(_run_dir(run, storage), ema, pipeline, print)
    written = sampling.command(origin, prompt or (), grid, embed, wish, out.expanduser().absolute(), "ema" if ema else "trained")
    print("\n".join(f"wrote {path}" for path in written))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects: name, status, found, remedy.")] = False,
    storage: Storage = None,
) -> None:
    """Look over this machine and its cluster; exits with 1 if something must be mended before a run."""
    from fluxray.runtime.doctor import examine, lines
    from fluxray.runtime.facts import gather
    from fluxray.runtime.paths import home

    findings = examine(gather(home(storage)))
    print(json.dumps([finding._asdict() for finding in findings], indent=1) if as_json else "\n".join(lines(findings)))
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(FAILURE)


@app.command()
def checkpoints(
    run: Run,
    verify: Annotated[bool, typer.Option("--verify", help="Read every tensor and compare it with its checksum.")] = False,
    prune: Annotated[int | None, typer.Option(metavar="N", min=1, help="Delete all but the newest N usable ones.")] = None,
    copy: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy one to a new folder, with all it needs.")] = None,
    step: Annotated[int | None, typer.Option(metavar="S", help="With --copy: that step's, not the newest.")] = None,
    storage: Storage = None,
) -> None:
    """List a run's checkpoints; verify, prune or copy them. Do not prune a run that is training."""
    from fluxray.runtime.paths import find_run, home

    if step is not None and copy is None:
        raise ConfigError("--step: has no effect without --copy; drop it or name a folder with --copy")
    with quick_imports():
        from fluxray.runtime import checkpoints as kept
        from fluxray.runtime.mirrored import lines_at, lines_of

    if "://" in run:
        if verify or prune is not None or copy is not None:
            raise ConfigError(f"RUN: {run} is only listed; `fluxray evaluate` fetches it, then name the run")
        print("\n".join(lines_at(run)))
        return
    run_dir = find_run(run, home(storage))
    if copy is not None:
        print(f"copied {run_dir.name} to {kept.copy(run_dir, copy.expanduser().absolute(), step)}")
    for path in kept.prune(run_dir, prune, verify) if prune is not None else ():
        print(f"deleted {path.name}")
    entries = kept.list_checkpoints(run_dir, verify)
    shown = kept.table(entries) if entries else [f"{run_dir.name} has no checkpoint yet"]
    print("\n".join([*shown, *lines_of(run_dir)]))
    if num_damaged := sum(entry.fault is not None for entry in entries):
        what = f"{num_damaged} of {len(entries)} checkpoints of {run_dir.name}"
        raise FailedError(f"{what} cannot be used; `--verify --prune N` deletes them")


@app.command()
def sync(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's name or folder; all runs without.")] = None,
    storage: Storage = None,
) -> None:
    """Send MLflow what it has not got yet of a run, or of all runs."""
    from fluxray.runtime.paths import find_run, home, list_runs, list_sweeps

    where = home(storage)
    run_dirs = [find_run(run, where)] if run is not None else [*list_sweeps(where), *list_runs(where)]
    from fluxray.runtime.tracking import sync as send

    if num_left := send(run_dirs, print):
        raise FailedError(f"MLflow lacks something of {num_left} run{'s' if num_left > 1 else ''}; once it answers, sync again")
    print("MLflow has everything")


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print what is running now, and end.")] = False,
    tracking: Annotated[
        str | None, typer.Option(metavar="URI", help="MLflow server; default: those of the runs in storage.", show_default=False)
    ] = None,
    storage: Storage = None,
) -> None:
    """Show the trainings that are running, anew every two seconds until Ctrl-C."""
    from fluxray.runtime.paths import home
    from fluxray.runtime.top import show

    show(home(storage), tracking, once)


@app.command()
def ui(
    port: Annotated[int, typer.Option(help="Port on this machine.", min=1, max=65535)] = 5000,
    storage: Storage = None,
) -> None:
    """Open MLflow's pages on the runs of this machine until Ctrl-C."""
    from fluxray.runtime.paths import home
    from fluxray.runtime.ui import serve

    serve(home(storage), port)


@app.command()
def tune(  # noqa: PLR0913, PLR0917 - the options of a command
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[SPACE] [KEY=VALUE]", help="A file such as tune_spaces/asha.yaml; keys.")
    ] = None,
    profile: Profile = None,
    model: Model = None,
    samples: Annotated[int | None, typer.Option(metavar="N", min=1, help="Draws, in place of the space's.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(metavar="N", min=1, help="Trials at a time, at most.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="NAME", help="Go on with that sweep.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print trials, memory plans and time; start nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Allow more than 10,000 trials.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any trial fails.")] = False,
    verbose: Verbose = False,
) -> None:
    """Search a space of configurations: every trial is a run, all are compared at the same budget."""
    from fluxray.runtime.stopping import interrupt_on_sigterm
    from fluxray.runtime.sweep_start import begin

    interrupt_on_sigterm()
    sweep = begin(words or (), profile, model, samples, resume)
    with quick_imports():
        from fluxray.runtime.sweep_shown import ending_lines, table_lines
        from fluxray.runtime.sweeps import REPORT_FILE

    if dry_run:
        with quick_imports():
            from fluxray.runtime.sweep_plan import describe

        describe(sweep, max_concurrent, yes, print)
        return
    with quick_imports():
        from fluxray.runtime.tune import run_sweep

    table = run_sweep(sweep, max_concurrent, yes, verbose)
    print("\n".join([*table_lines(table), *ending_lines(table)]), flush=True)
    if (report := sweep.folder / REPORT_FILE).exists():
        print(f"pictures and table: {report}")
    failed = table.with_status("failed")
    if table.winner is None:
        raise FailedError(f"sweep {sweep.name}: no trial has a result; the lines above say why")
    print(f"`{sweep.best_command}` prints it as a profile")
    if strict and failed:
        raise FailedError(f"sweep {sweep.name}: {len(failed)} of {len(table.trials)} trials failed, and --strict is set")


@app.command()
def best(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A sweep's name.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write, such as best.yaml.")] = None,
    storage: Storage = None,
) -> None:
    """Print the best trial of a sweep as a profile, for `fluxray train --profile FILE`."""
    from fluxray.runtime.paths import home
    from fluxray.runtime.sweep_start import best_profile

    text = best_profile(name, home(storage))
    if out is None:
        print(text, end="")
        return
    out.expanduser().absolute().write_text(text, encoding="utf-8")
    print(f"written to {out}; `fluxray train --profile {out}` takes it")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 the user's fault, 130 stopped (resumable)."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what it tries again is said in the end
    end_quickly()
    usage_error: Any = typer.BadParameter.__base__
    try:
        code = app(args=list(sys.argv[1:] if arguments is None else arguments) or ["--help"], standalone_mode=False)
        if code == STOPPED:  # typer's answer to a KeyboardInterrupt
            raise KeyboardInterrupt
    except FluxrayError as error:
        code = _end("error", error, USER_FAULT)
    except usage_error as error:
        code = _end("error", error.format_message() or "a command is missing; see fluxray --help", USER_FAULT)
    except FailedError as error:
        code = _end("failed", error, FAILURE)
    except StoppedError as error:
        code = _end("stopped", error, STOPPED)
    except (KeyboardInterrupt, typer.Abort):
        code = _end("stopped", "nothing is running any more", STOPPED)
    sys.exit(code if isinstance(code, int) else 0)


def _run_dir(run: str, storage: str | None) -> Path:
    """Return the folder of a run, given by name or folder; one given as MIRROR/RUN is fetched first."""
    from fluxray.runtime.paths import find_run, home

    if "://" not in run:
        return find_run(run, home(storage))
    from fluxray.runtime.mirrored import fetch_run

    return fetch_run(run, home(storage), print)


def _end(what: str, message: object, code: int) -> int:
    print(ending(what, message), file=sys.stderr, flush=True)
    return code


def _ui_hint(storage: str | None) -> str:
    """Return the command that opens the pages, as this shell finds it."""
    command = "fluxray"
    beside = Path(sys.executable).parent / "fluxray"
    if shutil.which(command) is None and beside.exists():
        command = os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
    return f"{command} ui" if storage is None else f"{command} ui --storage {storage}"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
