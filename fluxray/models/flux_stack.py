"""FLUX.1 and FLUX.2 transformers of diffusers as block stacks.

Shapes: B micro-batch, T image tokens (height x width), L text tokens, C packed channels, D hidden size.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fluxray.config.adapter import AdapterConfig
from fluxray.config.schema import Kernel, ModelConfig
from fluxray.errors import ConfigError
from fluxray.models import fused, lora
from fluxray.models.blocks import find_block_lists, first_value, materialise
from fluxray.models.flux import meta_transformer
from fluxray.models.flux_facts import FAMILIES
from fluxray.models.weights import PretrainedWeights
from fluxray.protocols import Block, BlockStack, FlowBatch, State
from fluxray.seeding import derive_seed


class Weights(Protocol):
    """Published weights of a whole model."""

    def copy_into(self, model: Any, paths: Collection[str], /) -> None:
        """Fill what the modules at `paths` hold themselves. Collective over all ranks."""
        ...

    def identity(self) -> str | None:
        """Return a hash of what has been read; None on ranks that read nothing."""
        ...


def build_flux(
    model: ModelConfig,
    seed: int,
    kernel: Kernel | None = None,
    weights: Weights | None = None,
    adapter: AdapterConfig | None = None,
) -> "FluxStack":
    """Return the block stack of a model on the meta device; `FluxStack.materialise` gives its tensors memory and values.

    `kernel` computes attention; without one it is the library's own call of torch's SDPA, which chooses for itself. `weights` are
    those that `model` names unless others are given. With an `adapter` that is all that is trained.
    """
    library = meta_transformer(model)
    if model.fused_qkv:
        fused.fuse_projections(library, type(library).__name__)
    if kernel is not None:
        from fluxray.models.flux_attention import set_kernel

        set_kernel(library, kernel)
    if weights is None and model.weights is not None:
        weights = PretrainedWeights(model.weights)
    if adapter is not None:
        lora.add_adapter(library, adapter, [block.name for block in _blocks(library)])
    return FluxStack(library, seed, weights)


@dataclass(frozen=True)
class FluxBlock:
    """One block of the library and how it is called. The carry is image [B, T, D] and text [B, L, D]; FLUX.2's single blocks take
    and leave text and image joined [B, L + T, D], and the first of them joins.
    """

    name: str
    module: nn.Module
    kind: str
    index: int

    def __call__(self, state: State) -> State:
        """Return the state behind this block."""
        shared = state.shared
        keyed: dict[str, Any] = {"image_rotary_emb": (shared["cos"], shared["sin"])}
        if state.dropout_seed is not None:
            keyed["dropout_seed"] = derive_seed(state.dropout_seed, self.index)
        if self.kind == "Flux2SingleTransformerBlock":
            joined = _joined(state.carry)
            return state._replace(carry=(self.module(joined, None, temb_mod=shared["mod_single"], **keyed),))
        if self.kind == "Flux2TransformerBlock":
            condition = {"temb_mod_img": shared["mod_image"], "temb_mod_txt": shared["mod_text"]}
        else:
            condition = {"temb": shared["temb"]}
        text, image = self.module(*state.carry, **condition, **keyed)
        return state._replace(carry=(image, text))


KINDS = {
    "FluxTransformer2DModel": ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    "Flux2Transformer2DModel": ("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
}
"""Classes of blocks that `FluxBlock` knows how to call, by the class of the transformer."""


class FluxStack(BlockStack):
    """A FLUX transformer as prologue, blocks and epilogue (see `protocols.BlockStack`).

    `model` is the library's, which starts on the meta device. `weights` are published ones, or None for random initialisation
    under `seed` by each module's own rule. Inputs are cast to the weights' dtype, as pipelines do.
    """

    model: Any
    compiles_each_shape = True

    def __init__(self, model: nn.Module, seed: int, weights: Weights | None = None):
        super().__init__()
        self.model = model
        self._seed = seed
        self._weights = weights
        self.blocks = _blocks(model)
        self.fused = fused.rows_of(model)
        self._is_second = FAMILIES[type(model).__name__] == "flux2"
        self.adapts, self.has_dropout = lora.is_adapted(model), lora.drops_inputs(model)
        self.dropout_modules = tuple(block.module for block in self.blocks)

    def prologue(self, batch: FlowBatch) -> State:
        """Embed image, text, noise level and guidance; compute modulation and rotary embeddings, which all blocks share."""
        model = self.model
        assert (batch.guidance is not None) == model.config.guidance_embeds
        dtype = model.x_embedder.weight.dtype
        noised, text = batch.noised.to(dtype), batch.text.to(dtype)
        image_BTD = model.x_embedder(noised)
        # as the library does, rounding included; under autocast FLUX.1's embedding is of 16 bits
        precision = noised.dtype if self._is_second else image_BTD.dtype
        sigma = batch.sigma.to(precision) * 1000
        guidance = None if batch.guidance is None else batch.guidance.to(precision) * 1000
        shared: dict[str, Tensor | None] = {}
        if self._is_second:
            shared["temb"] = temb = model.time_guidance_embed(sigma, guidance)
            shared["mod_image"] = model.double_stream_modulation_img(temb)
            shared["mod_text"] = model.double_stream_modulation_txt(temb)
            shared["mod_single"] = model.single_stream_modulation(temb)
        else:
            assert batch.pooled is not None
            scales = (sigma,) if guidance is None else (sigma, guidance)
            shared["temb"] = model.time_text_embed(*scales, batch.pooled.to(dtype))
        text_BLD = model.context_embedder(text)
        shared["cos"], shared["sin"] = model.pos_embed(self._position_ids(batch))
        seed = batch.key.stream("dropout") if self.has_dropout and self.training and batch.key is not None else None
        return State((image_BTD, text_BLD), shared, seed)

    def epilogue(self, state: State, batch: FlowBatch, loss_fn: Callable[[Tensor, Any], Any]) -> Any:
        """Apply the final norm and projection to the image, then `loss_fn` to the output [B, T, C]."""
        image_BTD = state.carry[0] if len(state.carry) == 2 else state.carry[0][:, batch.text.shape[1] :]
        return loss_fn(self.model.proj_out(self.model.norm_out(image_BTD, state.shared["temb"])), batch)

    def first_value(self, name: str) -> Tensor:
        """Return a parameter's first random value."""
        return first_value(self.model, name, self._seed, _initialise)

    def materialise(self, device: torch.device, block: Block | None) -> None:
        """Give the tensors of one block (None: of all outside the blocks) memory on `device` and their first values."""
        inside = tuple(f"{b.name}." for b in self.blocks)
        every = [path for path, _ in self.model.named_modules()]
        if block is not None:
            paths = [path for path in every if f"{path}.".startswith(f"{block.name}.")]
        else:
            paths = [path for path in every if not f"{path}.".startswith(inside)]
        materialise(self.model, paths, device, self._seed, _initialise)
        for path in paths:
            module = self.model.get_submodule(path)
            if isinstance(module, fused.FusedLinear):
                fused.initialise_parts(path, module, self._seed, _initialise)
        if self._weights is not None:
            self._weights.copy_into(self.model, paths)
        if block is None and self.adapts:
            self.base = lora.base_of(self._weights, self._seed, lora.kept_of(self.model))

    def _position_ids(self, batch: FlowBatch) -> Tensor:
        """Return the ids [L + T, axes] that the families' pipelines make: row and column of an image token; in FLUX.2 the place
        of a text token on the axis behind these.
        """
        device, num_text = batch.noised.device, batch.text.shape[1]
        ids = torch.zeros(num_text + batch.height * batch.width, 4 if self._is_second else 3, device=device)
        image = torch.arange(batch.height * batch.width, device=device)
        ids[num_text:, 1] = image // batch.width
        ids[num_text:, 2] = image % batch.width
        if self._is_second:
            ids[:num_text, 3] = torch.arange(num_text, device=device)
        return ids


def _joined(carry: tuple[Tensor, ...]) -> Tensor:
    if len(carry) == 1:
        return carry[0]
    image, text = carry
    return torch.cat([text, image], dim=1)


def _blocks(model: nn.Module) -> tuple[FluxBlock, ...]:
    name = type(model).__name__
    known = KINDS.get(name, ())
    found = [(f"{path}.{i}", module) for path, modules in find_block_lists(model) for i, module in enumerate(modules)]
    blocks = tuple(FluxBlock(path, module, type(module).__name__, index) for index, (path, module) in enumerate(found))
    kinds = list(dict.fromkeys(block.kind for block in blocks))
    unknown = [kind for kind in kinds if kind not in known]
    if unknown or not blocks or kinds != [kind for kind in known if kind in kinds]:
        what = f"has blocks of kind {unknown[0]!r}" if unknown else f"has block kinds {kinds} in this order"
        listed = "; ".join(f"{', '.join(kinds)} of {owner}" for owner, kinds in KINDS.items())
        raise ConfigError(f"model.config._class_name: {name} {what}; known are {listed}")
    return blocks


def _initialise(module: nn.Module) -> None:
    own: Any = module
    if hasattr(module, "reset_parameters"):
        own.reset_parameters()
        return
    assert not any(True for _ in module.parameters(recurse=False)), f"{type(module).__name__} has no first values"
