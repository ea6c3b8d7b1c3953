"""FLUX's attention by a kernel that the run names: what diffusers' own processors compute, and `attend` in the middle.

A processor has no parameters, so nothing of it is saved or exported. The library's own switch of kernels is of the whole process,
and outlives the model that it was set for.

Shapes: B micro-batch, S tokens of text and image, text first, H heads, D head size.
"""

from typing import Any

import torch
from diffusers.models import embeddings
from torch import Tensor, nn

from fluxray.config.schema import Kernel
from fluxray.models.attention import attend

_apply_rotary: Any = embeddings.apply_rotary_emb

Rotary = tuple[Tensor, Tensor]
"""cos and sin [S, D]."""


def set_kernel(model: nn.Module, kernel: Kernel) -> None:
    """Let every attention of a FLUX transformer compute with the kernel."""
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "set_processor")]
    for attention in attentions:
        parallel = hasattr(attention, "to_qkv_mlp_proj")
        attention.set_processor(ParallelProcessor(kernel) if parallel else JointProcessor(kernel))


class JointProcessor:
    """Attention of both families' double blocks over text and image, and of FLUX.1's single blocks over the two joined."""

    def __init__(self, kernel: Kernel):
        self._kernel: Kernel = kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> Any:
        """Return the image's and the text's output; that of the joined tokens, not projected, where there is no text apart."""
        assert attention_mask is None and image_rotary_emb is not None
        query, key, value = (_heads(project(hidden_states), attn) for project in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is None:
            return _attend(query, key, value, image_rotary_emb, self._kernel)
        added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_query, text_key, text_value = (_heads(project(encoder_hidden_states), attn) for project in added)
        query = torch.cat([attn.norm_added_q(text_query), query], dim=1)
        key = torch.cat([attn.norm_added_k(text_key), key], dim=1)
        value = torch.cat([text_value, value], dim=1)
        found = _attend(query, key, value, image_rotary_emb, self._kernel)
        num_text = encoder_hidden_states.shape[1]
        text, image = found[:, :num_text].contiguous(), found[:, num_text:].contiguous()
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


class ParallelProcessor:
    """Attention and feed-forward side by side, as FLUX.2's single blocks have them."""

    def __init__(self, kernel: Kernel):
        self._kernel: Kernel = kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> Tensor:
        """Return the output of the joined tokens."""
        assert attention_mask is None and image_rotary_emb is not None
        width = attn.inner_dim
        projected = attn.to_qkv_mlp_proj(hidden_states)
        query, key, value = (_heads(part, attn) for part in projected[..., : 3 * width].chunk(3, dim=-1))
        found = _attend(attn.norm_q(query), attn.norm_k(key), value, image_rotary_emb, self._kernel)
        return attn.to_out(torch.cat([found, attn.mlp_act_fn(projected[..., 3 * width :])], dim=-1))


def _heads(projected: Tensor, attn: Any) -> Tensor:
    return projected.unflatten(-1, (-1, attn.head_dim))


def _attend(query_BSHD: Tensor, key_BSHD: Tensor, value_BSHD: Tensor, rotary: Rotary, kernel: Kernel) -> Tensor:
    """Return attention of all tokens to all, heads one beside the other."""
    query_BSHD, key_BSHD = (_apply_rotary(tensor, rotary, sequence_dim=1) for tensor in (query_BSHD, key_BSHD))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BSHD, key_BSHD, value_BSHD))
    scaling = query.shape[-1] ** -0.5
    found, _ = attend(None, query, key, value, None, kernel=kernel, scaling=scaling, causal=False)
    if kernel == "cudnn" and torch.compiler.is_compiling():
        # Behind a single block's attention lies a concatenation, whose gradient is a view that cuDNN must not be given. Two signs
        # change no bit, and their gradient is written out densely, in the kernel that would copy the view.
        found = found.neg().neg()
    return found.flatten(2, 3).to(query_BSHD.dtype)
