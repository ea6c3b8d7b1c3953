"""Encoding ahead on one GPU, with encoders of the published sizes and random weights, against the bare encoders on the same card.

    python benchmarks/encode.py [--only flux1 klein] [--pictures 768] [--size 1024] [--out DIR] [--tiny]

`fluxray encode` runs as users run it: pictures on disk, Ray, shards written. Its rate is that from the first shard of a pass to
the last, so that the start of processes and the loading of weights, which are told apart, do not count. Bare is the encoder alone
in a loop over a batch that lies on the card. --tiny rehearses everything with small models, on a CPU.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAMILIES = {"flux1": "flux1-dev", "klein": "flux2-klein-4b"}
"""Each family, and the preset whose transformer its encoders belong to."""

UNITS = {"pictures": "pictures through the VAE", "captions": "captions through the text encoders"}
CAPTION = "a red boat under an old bridge of stone in the morning, painted by hand on wood and seen from above"
WORDS = CAPTION.split()
BARE_S = 10.0


def vae_config(channels: int, tiny: bool) -> dict[str, Any]:
    widths = (8, 8, 8, 8) if tiny else (128, 256, 512, 512)
    return {
        "latent_channels": channels, "block_out_channels": widths, "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 1 if tiny else 2, "norm_num_groups": 4 if tiny else 32,
    }  # fmt: skip


def make_pipeline(family: str, folder: Path, tiny: bool) -> None:
    """Save a pipeline of random encoders, in bf16 unless it is tiny, with the configuration of the preset's transformer."""
    import diffusers
    import torch

    from fluxray.config.load import resolve
    from fluxray.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([CAPTION] * 50, 400)
    tokenizer.model_max_length = 77
    preset = {"flux1": "flux1-tiny", "klein": "flux2-tiny"}[family] if tiny else FAMILIES[family]
    transformer = dict(resolve(None, preset).model.config)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if family == "flux1":
            made = _flux1(diffusers, scheduler, tokenizer, transformer, tiny)
        else:
            made = _klein(diffusers, scheduler, tokenizer, transformer, tiny)
    torch.set_default_dtype(before)
    made.save_pretrained(folder)
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(transformer))
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["diffusers", transformer["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index))
    del made
    gc.collect()
    torch.cuda.empty_cache()


def _flux1(diffusers: Any, scheduler: Any, tokenizer: Any, transformer: dict[str, Any], tiny: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    width, pooled = transformer["joint_attention_dim"], transformer["pooled_projection_dim"]
    t5: dict[str, Any] = {"d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    clip: dict[str, Any] = {"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    if tiny:
        t5 = {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        clip = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return diffusers.FluxPipeline(
        scheduler,
        diffusers.AutoencoderKL(
            **vae_config(16, tiny), use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159
        ),
        CLIPTextModel(CLIPTextConfig(vocab_size=49408, hidden_size=pooled, max_position_embeddings=77, **clip, **ends)),
        tokenizer,
        T5EncoderModel(T5Config(vocab_size=32128, d_model=width, feed_forward_proj="gated-gelu", **t5)),
        tokenizer,
        None,
    )


def _klein(diffusers: Any, scheduler: Any, tokenizer: Any, transformer: dict[str, Any], tiny: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer.chat_template = "{% for m in messages %}user: {{ m.content }}\n{% endfor %}"
    qwen3: dict[str, Any] = {
        "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    if tiny:
        qwen3 |= {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=151936, hidden_size=transformer["joint_attention_dim"] // 3, tie_word_embeddings=True, **qwen3
    )
    vae = diffusers.AutoencoderKLFlux2(**vae_config(32, tiny))
    return diffusers.Flux2KleinPipeline(scheduler, vae, Qwen3ForCausalLM(config), tokenizer, None)


def write_pictures(folder: Path, number: int, size: int) -> None:
    """Write JPEG files a quarter larger than `size`, smooth with some noise as photographs are, and their captions."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    random = np.random.default_rng(0)
    side = size * 5 // 4
    for count in range(number):
        rough = Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize(
            (side, side), Image.Resampling.BICUBIC
        )
        noise = random.integers(-6, 7, (side, side, 1), dtype=np.int16)
        Image.fromarray(np.clip(np.asarray(rough) + noise, 0, 255).astype(np.uint8)).save(folder / f"{count:05d}.jpg", quality=92)
        (folder / f"{count:05d}.txt").write_text(" ".join(random.permutation(WORDS)) + f", number {count}")


def encode(family: str, folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Encode the pictures as users do; return of each unit the steady rate and the seconds until the first shard was there."""
    from fluxray.config.load import resolve
    from fluxray.runtime.encode import encode_ahead

    seen: dict[str, list[tuple[float, int]]] = {}

    def watch(unit: str, num_done: int, _: int) -> None:
        if unit in UNITS:
            seen.setdefault(unit, []).append((time.monotonic(), num_done))
            print(f"{unit} {num_done}", file=sys.stderr, flush=True)

    preset = {"flux1": "flux1-tiny", "klein": "flux2-tiny"}[family] if arguments.tiny else FAMILIES[family]
    config = resolve("cpu" if arguments.tiny else "fsdp8", preset, [
        "resources.num_workers=1", f"model.weights=path:{folder / 'pipeline'}", f"data.source=folder:{folder / 'photos'}",
        f"data.cache={folder / 'cache'}", f"encode.resolution={arguments.size}", *arguments.words,
        *(["encode.bucket_step=16", "encode.shard_bytes=256KiB"] if arguments.tiny else []),
    ])  # fmt: skip
    encode_ahead(config, watch=watch)
    found = {}
    for unit, marks in seen.items():
        first, last = next(mark for mark in marks if mark[1]), marks[-1]
        steady = (last[1] - first[1]) / (last[0] - first[0]) if last[1] > first[1] else float("nan")
        found[unit] = {"rate": steady, "first_s": first[0] - marks[0][0]}
    return found


def bare(unit: str, folder: Path, arguments: argparse.Namespace) -> float:
    """Return how many pictures or captions a second the encoder alone makes of a batch on the device."""
    import torch

    from fluxray.config.encode import EncodeConfig
    from fluxray.models.encoders import TextEncoder, VaeEncoder, encoder_facts

    settings = EncodeConfig()
    facts = encoder_facts(f"path:{folder / 'pipeline'}")
    device = torch.device("cpu" if arguments.tiny else "cuda")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    if unit == "pictures":
        vae = VaeEncoder(facts, dtype, device).vae
        number = max(settings.batch_pixels // arguments.size**2, 1)
        pixels = torch.rand(number, 3, arguments.size, arguments.size, device=device, dtype=dtype)
        return number * _per_second(lambda: vae.encode(pixels).latent_dist.mean, device)
    encoder = TextEncoder(facts, dtype, device)
    captions = [CAPTION] * settings.batch_captions
    return len(captions) * _per_second(lambda: encoder.embed(captions), device)


def _per_second(call: Callable[[], Any], device: Any) -> float:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad():
        for _ in range(3):
            call()
        wait()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < BARE_S:
            call()
            wait()
            count += 1
    return count / (time.perf_counter() - begin)


def measure(family: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one family."""
    import torch

    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        make_pipeline(family, folder / "pipeline", arguments.tiny)
        write_pictures(folder / "photos", arguments.pictures, arguments.size)
        alone = {}
        for unit in UNITS:
            alone[unit] = bare(unit, folder, arguments)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        found = encode(family, folder, arguments)
        num_bytes = sum(path.stat().st_size for path in (folder / "cache").glob("*.tar"))
    return [
        {
            "model": FAMILIES[family], "precision": "fp32" if arguments.tiny else "bf16", "num_gpus": 0 if arguments.tiny else 1,
            "resolution": arguments.size, "images_per_s": round(of["rate"], 2), "bare_images_per_s": round(alone[unit], 2),
            "ratio": round(of["rate"] / alone[unit], 3), "claim": "90% of the bare encoder",
            "first_shard_s": round(of["first_s"], 1), "gigabytes": round(num_bytes / 1e9, 2), "note": UNITS[unit],
        }
        for unit, of in found.items()
    ]  # fmt: skip


def main() -> None:
    """Measure each family in its own process and write benchmarks/results/encode.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--pictures", type=int, default=768)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument(
        "--words", nargs="*", default=[], help="more words of the configuration, such as encode.batch_pixels=4194304"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", type=Path, help="folder with 20 GB free; default: the system's temporary one")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU, to rehearse; no file is written")
    parser.add_argument("--family", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.family:
        for row in measure(arguments.family, arguments):
            print("ROW " + json.dumps(row), flush=True)
        return
    import common

    rows: list[dict[str, Any]] = []
    for family in arguments.only:
        command = [sys.executable, __file__, "--family", family, *sys.argv[1:]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, "RAY_ADDRESS": ""})
        found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
        rows += found or [{"model": FAMILIES[family], "note": f"failed with exit code {done.returncode}"}]
        for row in found:
            print(json.dumps(row), flush=True)
    if not arguments.tiny:
        common.write("encode", rows, arguments.out or common.RESULTS, prints=False)


if __name__ == "__main__":
    main()
