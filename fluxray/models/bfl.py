"""The single-file format of black-forest-labs, which ComfyUI loads: its names, and the rows of which its tensors are made.

It holds queries, keys and values of an attention as one tensor (FLUX.1's single blocks: with the MLP's input), and shift before
scale where diffusers has scale before shift. D is the width of the model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fluxray.errors import ConfigError
from fluxray.models.stored import Stored

FLUX1, FLUX2 = "FluxTransformer2DModel", "Flux2Transformer2DModel"

PREFIX = "model.diffusion_model."
"""What ComfyUI's own saves put before each name; other tensors of such a file are of other models."""

CONFIG_KEY = "transformer_config"
"""Where the metadata of a file has diffusers' config.json, of which `UNSEEN` is read."""

UNSEEN: Mapping[str, Mapping[str, Any]] = {
    FLUX1: {"axes_dims_rope": [16, 56, 56]},
    FLUX2: {"axes_dims_rope": [32, 32, 32, 32], "rope_theta": 2000, "eps": 1e-6},
}
"""Keys of the configuration that no shape tells, and the published models' values."""

SWAPPED = ("final_layer.adaLN_modulation.1", "norm_out.linear")
"""The layer whose two halves change places, in the file and in diffusers."""

_ENDS = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
}
_ATTENTION = {
    "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "txt_attn.proj": "attn.to_add_out",
}
_SINGLE_NORMS = {"norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k"}


def _embedders(parent: str, names: Mapping[str, str]) -> dict[str, str]:
    layers = {"in_layer": "linear_1", "out_layer": "linear_2"}
    return {f"{key}.{a}": f"{parent}.{name}.{b}" for key, name in names.items() for a, b in layers.items()}


class _Names(NamedTuple):
    """Modules of the file and those of diffusers of which each is made: outside the blocks, in a double and in a single one."""

    rest: Mapping[str, str]
    double: Mapping[str, str]
    single: Mapping[str, str]


NAMES: Mapping[str, _Names] = {
    FLUX1: _Names(
        rest={
            **_ENDS,
            **_embedders(
                "time_text_embed",
                {"time_in": "timestep_embedder", "vector_in": "text_embedder", "guidance_in": "guidance_embedder"},
            ),
        },
        double={
            **_ATTENTION,
            "img_mod.lin": "norm1.linear",
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mod.lin": "norm1_context.linear",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
        },
        single={
            **_SINGLE_NORMS,
            "modulation.lin": "norm.linear",
            "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
            "linear2": "proj_out",
        },
    ),
    FLUX2: _Names(
        rest={
            **_ENDS,
            **_embedders("time_guidance_embed", {"time_in": "timestep_embedder", "guidance_in": "guidance_embedder"}),
            "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
            "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
            "single_stream_modulation.lin": "single_stream_modulation.linear",
        },
        double={
            **_ATTENTION,
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        },
        single={**_SINGLE_NORMS, "linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"},
    ),
}
"""By the class of diffusers."""


class Part(NamedTuple):
    """Rows [first, first + num_rows) of diffusers' parameter `name`."""

    name: str
    first: int
    num_rows: int


def bfl_layout(class_name: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Part, ...]]:
    """Return, for each tensor of the file, of which rows of diffusers' parameters it is made, one below the other.

    `shapes` are those of all parameters of a model of the class. Raises ConfigError for one that has no place in the format.
    """
    layout: dict[str, tuple[Part, ...]] = {}
    for module, parts in _modules(class_name, shapes):
        for leaf in ("weight", "bias"):
            names = [f"{part}.{leaf}" for part in parts.split()]
            if any(name in shapes for name in names):
                key = f"{module}.scale" if module.endswith(("query_norm", "key_norm")) else f"{module}.{leaf}"
                layout[key] = tuple(Part(name, 0, shapes[name][0]) for name in names)
    for leaf in ("weight", "bias"):
        name = f"{SWAPPED[1]}.{leaf}"
        if name in shapes:
            half = shapes[name][0] // 2
            layout[f"{SWAPPED[0]}.{leaf}"] = (Part(name, half, half), Part(name, 0, half))
    for name in sorted(set(shapes) - {part.name for parts in layout.values() for part in parts}):
        raise ConfigError(f"--format: bfl has no place for {name} of {class_name}; use library")
    return layout


def shape_of(parts: Sequence[Part], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the shape of a tensor of the file."""
    return [sum(part.num_rows for part in parts), *shapes[parts[0].name][1:]]


def in_diffusers_names(stored: Mapping[str, Stored], layout: Mapping[str, Sequence[Part]]) -> dict[str, Stored]:
    """Return where each parameter of diffusers lies among the tensors of a file, whose names and shapes are the layout's."""
    ranges: dict[str, list[tuple[int, str, tuple[int, int]]]] = {}
    for key, parts in layout.items():
        begin = 0
        for part in parts:
            ranges.setdefault(part.name, []).append((part.first, key, (begin, begin + part.num_rows)))
            begin += part.num_rows
    found: dict[str, Stored] = {}
    for name, places in ranges.items():
        whole = stored[places[0][1]]
        rows = [span for _, _, span in sorted(places)]
        found[name] = whole if rows == [(0, whole.shape[0])] else whole.taken(rows)
    return found


def bfl_tensors(stored: Mapping[str, Stored]) -> dict[str, Stored] | None:
    """Return a file's tensors of the transformer under the format's own names; None if it holds no such transformer."""
    for prefix in ("", PREFIX):
        own = {_with_scale(key.removeprefix(prefix)): value for key, value in stored.items() if key.startswith(prefix)}
        if "img_in.weight" in own and "double_blocks.0.img_attn.qkv.weight" in own:
            return own
    return None


def bfl_config(stored: Mapping[str, Stored], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return diffusers' configuration of a file's transformer, by its tensors' shapes.

    What these do not tell is what the metadata say that the file was written with, else what all published models have. Raises
    KeyError for a tensor that is missing, ValueError where neither tells a rotary embedding that fits.
    """
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    class_name = FLUX2 if "double_stream_modulation_img.lin.weight" in shapes else FLUX1
    width, in_channels = shapes["img_in.weight"]
    out_channels, head = shapes["final_layer.linear.weight"][0], shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    config: dict[str, Any] = {
        "_class_name": class_name,
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "num_layers": _num_blocks(shapes, "double_blocks."),
        "num_single_layers": _num_blocks(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }
    if class_name == FLUX1:
        config["pooled_projection_dim"] = shapes["vector_in.in_layer.weight"][1]
    else:
        config["timestep_guidance_channels"] = shapes["time_in.in_layer.weight"][1]
        config["mlp_ratio"] = shapes["double_blocks.0.img_mlp.2.weight"][1] / width
    written = json.loads(metadata.get(CONFIG_KEY, "{}"))
    config |= {key: written.get(key, value) for key, value in UNSEEN[class_name].items()}
    if sum(config["axes_dims_rope"]) != head:
        raise ValueError(f"its heads have {head} channels, and no rotary embedding is known for them")
    return config


def _modules(class_name: str, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, str]]:
    names = NAMES[class_name]
    yield from names.rest.items()
    for own, blocks, inside in (
        ("double_blocks", "transformer_blocks", names.double),
        ("single_blocks", "single_transformer_blocks", names.single),
    ):
        for i in range(_num_blocks(shapes, f"{blocks}.")):
            for module, parts in inside.items():
                yield f"{own}.{i}.{module}", " ".join(f"{blocks}.{i}.{part}" for part in parts.split())


def _num_blocks(names: Mapping[str, Any], prefix: str) -> int:
    numbers = (name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix))
    return max((int(number) for number in numbers), default=-1) + 1


def _with_scale(key: str) -> str:
    """Return the format's name of a norm's gain, which some files call a weight."""
    module, _, leaf = key.rpartition(".")
    return f"{module}.scale" if leaf == "weight" and module.endswith(("query_norm", "key_norm")) else key
