"""FSDP2 on 1, 2, 4 and 8 GPUs of one host: rates, memory, where the time goes, checkpoints, a lost worker, plain FSDP2 beside it.

    python benchmarks/scaling.py [--gpus 1 2 4 8] [--only ROW ...] [--steps 8] [--baseline FILE] [--add] [--out DIR] [--rehearse]

Every row on every number of GPUs is a group of processes of its own, started as torchrun starts them; a worker is killed under
Ray. Weights, latents and embeddings are random, text is real. Rows for speed give every GPU the same; rows for losses share the
same global batches. FLOPs are three times the forward's, causal attention counted as half. The time's parts are rank 0's, from
the kernels of a profiler's trace. --baseline is a script that torchrun runs, whose lines of results are read (plain FSDP2,
eager, and compiled where it is named twice). --add keeps the rows of other sittings. --rehearse does everything that is not a
GPU's with tiny models on the CPU.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scaling_cases import CASES, SIXTEEN, STREAMED, Case

Row = dict[str, Any]

WORKER = Path(__file__).with_name("scaling_worker.py")
RESULT_OF_BASELINE = re.compile(
    r"compiled \w+, (?P<size>\d+) per GPU, (?P<side>\d+) px: first step (?P<first>[\d.]+) s, then (?P<step>[\d.]+) s, "
    r"(?P<rate>[\d.]+) img/s, (?P<tflops>[\d.]+) TFLOPS per GPU, (?P<gib>[\d.]+) GiB"
)
SAME_LOSS = 2e-3
"""Of bf16 losses, relative, between shapes: partial sums are rounded at other places."""


def group_run(words: Sequence[str], num_gpus: int, limit_s: float, folder: Path) -> Row | str:
    """Run a group of workers to its end; return what rank 0 measured, or why there is nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_gpus),
        "LOCAL_WORLD_SIZE": str(num_gpus), "NCCL_NVLS_ENABLE": "0", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }  # fmt: skip
    logs = [folder / f"rank-{rank}.log" for rank in range(num_gpus)]
    processes: list[subprocess.Popen[bytes]] = []
    for rank, log in enumerate(logs):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("wb") as file:
            processes.append(
                subprocess.Popen([sys.executable, str(WORKER), *words], env=environment, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        failed = _wait(processes, limit_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [line[4:] for line in logs[0].read_text(errors="replace").splitlines() if line.startswith("ROW ")]
    if found and failed is None:
        return json.loads(found[0])
    if failed is None:
        return "ended without a result"
    rank, why = failed
    lines = [line for line in logs[rank].read_text(errors="replace").splitlines() if line.strip()]
    return f"{why} {' / '.join(lines[-3:])[-500:]}"


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> tuple[int, str] | None:
    """Return once all have ended well, or the first that has failed, or rank 0 where there was no end in `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank, f"rank {rank}:"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return 0, f"not done after {limit_s:.0f} s:"
        time.sleep(0.2)


def row_words(row: str, folder: Path, given: argparse.Namespace, *more: str, words: Sequence[str] = ()) -> list[str]:
    """Return the command line of a worker."""
    flags = ["--rehearse"] if given.rehearse else []
    return [row, str(folder), "--steps", str(given.steps), *flags, *more, "--set", *given.set, *words]


def measured(row: str, num_gpus: int, given: argparse.Namespace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of a case on `num_gpus`."""
    case = CASES[row]
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        if case.purpose == "kill":
            yield killed(row, case, num_gpus, given, folder)
            return
        fault = _write_data(row, num_gpus, given, folder)
        if fault is not None:
            yield _row(row, case, num_gpus, fault)
            return
        yield _row(row, case, num_gpus, group_run(row_words(row, folder, given), num_gpus, given.limit, folder))
        if case.purpose == "save" and (folder / "run").is_dir():
            yield from resumed(row, case, num_gpus, given, folder)


def resumed(row: str, case: Case, num_gpus: int, given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield what goes on from a group's checkpoint: half of its GPUs, and one that streams."""
    shapes: list[tuple[str, int, Sequence[str]]] = []
    if num_gpus > 1:
        shapes.append((f"{row}, resumed by {num_gpus // 2}", num_gpus // 2, ()))
    streamed = ("activation_checkpoint=full", "engine.kind=stream") if given.rehearse else STREAMED
    shapes.append((f"{row}, resumed by one that streams", 1, streamed))
    for note, number, words in shapes:
        found = group_run(row_words(row, folder, given, "--purpose", "resume", words=words), number, given.limit, folder)
        yield {**_row(row, case, number, found), "note": note, "saved_by": num_gpus}


def killed(row: str, case: Case, num_gpus: int, given: argparse.Namespace, folder: Path) -> Row:
    """Return the seconds from a SIGKILL of one worker to the next step, the way of `drill.py`."""
    import drill
    import ray
    from ray.cluster_utils import Cluster

    shape = {"model": case.model, "note": row, "num_gpus": num_gpus}
    words = [f"resources.num_workers={num_gpus}", "train.num_steps=60", "checkpoint.every_steps=10", "train.log_every=1"]
    words += ["evaluation.max_rows=8", "resources.collective_timeout_s=60", *given.set]
    if given.rehearse:
        model, cpus = [*drill.MODEL[:5], "hardware.tflops=1"], 2.0
        words += ["batch.micro_size=2", f"resources.cpu={1.8 / num_gpus}"]
    else:
        model, cpus = ["--profile=fsdp8", f"--model={case.model}"], 4.0 * num_gpus + 2
        words += ["batch.micro_size=2", "data.max_slice=2048", "data.vocab_size=8192"]
    gpus = 0 if given.rehearse else num_gpus
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "num_gpus": gpus})
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    run = drill.Drill(folder, "killed", words, cluster, None, cpus, model)
    try:
        (fault,) = drill.disturb(run, [(15, "worker")])
    except (AssertionError, ValueError) as error:
        return {**shape, "note": f"{row}: failed: {str(error)[-400:]}"}
    finally:
        if run.driver is not None and run.driver.poll() is None:
            run.driver.send_signal(signal.SIGKILL)
        ray.shutdown()
        cluster.shutdown()
    return {**shape, "median_s": round(fault.seconds, 1), "most_steps_again": fault.at_step - fault.resumed}


def baseline(script: Path, num_gpus: int, compiled: bool, limit_s: float) -> list[Row]:
    """Return the rows of a script of plain FSDP2 that torchrun runs on `num_gpus`."""
    note = f"plain FSDP2, {'compiled' if compiled else 'eager'}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_gpus}", str(script)]
    command += ["compile"] if compiled else []
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return [{"model": "flux1-dev", "note": f"{note}: failed: not done after {limit_s:.0f} s", "num_gpus": num_gpus}]
    rows = [
        {
            "model": "flux1-dev", "note": f"{note}, {found['side']} px", "num_gpus": num_gpus,
            "resolution": int(found["side"]), "images_per_step": int(found["size"]) * num_gpus,
            "images_per_s": float(found["rate"]), "step_s": float(found["step"]), "first_step_s": float(found["first"]),
            "model_tflops": float(found["tflops"]), "peak_allocated_gib": float(found["gib"]),
        }
        for found in RESULT_OF_BASELINE.finditer(done.stdout)
    ]  # fmt: skip
    reason = [line for line in done.stderr.splitlines() if "Error" in line][-1:] or ["no result"]
    return rows or [{"model": "flux1-dev", "note": f"{note}: failed: {reason[0][-400:]}", "num_gpus": num_gpus}]


def compare(rows: Iterable[Row]) -> None:
    """Add to the rows of one sitting what follows from others: of linear scaling, over plain FSDP2, how far losses are off."""
    rows = list(rows)
    for row in rows:
        key = "images_per_s" if "images_per_s" in row else "tokens_per_s"
        same = [other for other in rows if other["note"] == row["note"] and key in other]
        if key in row and "parts_s" in row:
            fewest = min(same, key=lambda other: other["num_gpus"])
            row["of_linear"] = round(row[key] / row["num_gpus"] / (fewest[key] / fewest["num_gpus"]), 3)
            row["linear_from"] = fewest["num_gpus"]
            note = f"plain FSDP2, eager, {row.get('resolution')} px"
            plain = next((o for o in rows if o["note"] == note and o["num_gpus"] == row["num_gpus"]), None)
            if plain is not None:
                row |= {"baseline": note, "ratio": round(row[key] / plain[key], 3)}
        if "losses" in row:
            first = _reference(row, rows)
            pairs = list(zip(row["losses"], first["losses"], strict=False))
            row["off_by_loss"] = max(abs(mine - other) / abs(other) for mine, other in pairs)
            row["within_tolerance"] = row["off_by_loss"] <= SAME_LOSS


def _reference(row: Row, rows: Sequence[Row]) -> Row:
    """Return whose losses a row's are compared with: those on the fewest GPUs, or those behind the save that it goes on from."""
    if "saved_by" in row:
        note = row["note"].partition(", resumed by")[0]
        return next((o for o in rows if o["note"] == note and o["num_gpus"] == row["saved_by"] and "losses" in o), row)
    return min((o for o in rows if o["note"] == row["note"] and "losses" in o), key=lambda other: other["num_gpus"])


def _row(row: str, case: Case, num_gpus: int, found: Row | str) -> Row:
    if isinstance(found, str):
        return {"model": case.model, "note": f"{row}: failed: {found}", "num_gpus": num_gpus}
    return found


def _write_data(row: str, num_gpus: int, given: argparse.Namespace, folder: Path) -> str | None:
    """Write a row's data in a process of its own, so that this one never holds a GPU; return why it could not be done."""
    words = [row, str(folder), str(num_gpus), *(["--rehearse"] if given.rehearse else [])]
    command = [sys.executable, str(WORKER.with_name("scaling_cases.py")), *words]
    done = subprocess.run(command, env=_with_root(), capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def _with_root() -> dict[str, str]:
    root = str(WORKER.parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def main() -> None:
    """Measure the rows and write benchmarks/results/scaling.json after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, default=570, help="seconds of one group")
    parser.add_argument("--baseline", type=Path, action="append", default=[], help="twice: compiled as well")
    parser.add_argument("--scratch", type=Path, help="where data and checkpoints lie meanwhile")
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], help="more words of the configuration, for every row")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = _with_root()["PYTHONPATH"]
    import common
    import torch

    available = max(given.gpus) if given.rehearse else torch.cuda.device_count()
    counts = [count for count in given.gpus if count <= available and count <= SIXTEEN]
    out = given.out or common.RESULTS
    kept = json.loads((out / "scaling.json").read_text())["rows"] if given.add and (out / "scaling.json").exists() else []
    rows: list[Row] = []

    def take(found: Iterable[Row]) -> None:
        for row in found:
            rows.append(row)
            compare([one for one in rows if ": failed:" not in one["note"]])
            print(json.dumps(row), flush=True)
            new = {(one["note"], one["num_gpus"]) for one in rows}
            others = [one for one in kept if (one["note"], one["num_gpus"]) not in new]
            common.write("scaling", [*others, *rows], out, prints=False)

    where = {"machine": common.machine(), "versions": common.versions(), "command": common.repeatable_command()}
    print(json.dumps(where), flush=True)
    for count in counts:
        for index, script in enumerate(given.baseline):
            take(baseline(script, count, index > 0, given.limit))
    for row in given.only:
        for count in counts:
            take(measured(row, count, given, given.scratch or Path(tempfile.gettempdir())))
    for line in table(rows):
        print(line)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines of a table."""
    import render

    return render.table(list(rows)).splitlines()


if __name__ == "__main__":
    main()
