"""Everything that is done to a model before it is trained, in the order in which it is done."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fluxray.config.schema import CheckpointKind
from fluxray.engine.activation_checkpoint import checkpoint_blocks, checkpoint_segments
from fluxray.engine.dropout import apply_dropout_keys
from fluxray.engine.forward import wrap_forward
from fluxray.engine.masters import Masters
from fluxray.engine.offload import Offload, offload_inputs
from fluxray.engine.precision import Precision
from fluxray.engine.stream_transfers import Transfers, transfers_of
from fluxray.memory.operations import Operation
from fluxray.protocols import BlockStack

MOST_FORMS = 1024
"""Of compiled code of one function: blocks share one function, and differ in class, in what they keep, in mode and in shapes.
Torch runs what is beyond uncompiled, and begins with 8."""


@dataclass(frozen=True)
class Techniques:
    """What is applied to the model. `precision` is the cast policy:

    * `fp32`: everything in fp32;
    * `amp-bf16`: fp32 parameters, matrix products in bf16 by autocast;
    * `amp-fp16`: the same in fp16, whose loss the engine scales (`engine/scaler.py`);
    * `mixed-bf16`: fp32 masters, parameters, activations and persistent buffers in bf16, gradients reduced and accumulated in
    fp32.
      Buffers that the library computes itself, the rotary frequencies, stay in fp32: in bf16 a position of 2,048 would be off
      by radians.

    `checkpoint_every` is the n of `every_n`; `kept_operations` are of each block those whose results `selective` keeps. With
    `cpu_offload`, which wants a GPU and a mesh, each rank's shards and their gradients are in page-locked host memory.
    """

    precision: Precision
    compile: bool = False
    activation_checkpoint: CheckpointKind = "none"
    checkpoint_every: int = 2
    kept_operations: Sequence[Collection[Operation]] = ()
    reshard_after_forward: bool = True
    cpu_offload: bool = False


def parallelize(
    stack: BlockStack,
    techniques: Techniques,
    device: torch.device,
    mesh: DeviceMesh | None,
    transfers: Transfers | None = None,
) -> Masters:
    """Prepare a meta-device stack for training on `device`, sharded over `mesh` if there is one; return what the optimizer steps.

    `transfers` copy what waits on the host, if anything does.
    Tensors get memory block by block, and a block is sharded before the next one is allocated, so a rank never holds more than
    its shards and one whole block.
    """
    inside = techniques.compile and not stack.is_whole_again  # see prepare_stream
    if inside:
        apply_activation_checkpoint(stack, techniques)
    if techniques.compile:
        apply_compile(stack)
    apply_dropout_keys(stack)
    if not inside:
        apply_activation_checkpoint(stack, techniques)
    if techniques.activation_checkpoint == "offload":
        offload_inputs(stack, Offload(transfers or transfers_of(device), device))
    if mesh is None:
        assert not techniques.cpu_offload, "build_engine gives it a mesh"
        return apply_resident(stack, techniques, device)
    return apply_fsdp(stack, techniques, device, mesh)


def prepare_stream(
    stack: BlockStack, compiles: bool, kept_blocks: int = 0, kept_operations: Sequence[Collection[Operation]] = ()
) -> None:
    """Prepare a stack for the stream engine: blocks keep their input and compute the rest again when backward reaches them.

    The last block, whose backward follows at once, and `kept_blocks` before it keep everything; the others keep the results of
    `kept_operations`, given for each block, too. Where the checkpoint is compiled with the block, backward computes again only
    what it needs: not the block's last matrix products, whose result is known. Some blocks are computed again as a whole
    (`BlockStack.is_whole_again`).
    """
    again = stack.blocks[: max(len(stack.blocks) - 1 - kept_blocks, 0)]
    inside = compiles and not stack.is_whole_again
    if inside:
        checkpoint_blocks(again, kept_operations)
    if compiles:
        apply_compile(stack)
    apply_dropout_keys(stack)
    if not inside:
        checkpoint_blocks(again, kept_operations)


def apply_activation_checkpoint(stack: BlockStack, techniques: Techniques) -> None:
    """Say which activations are kept (see `engine/activation_checkpoint.py`)."""
    match techniques.activation_checkpoint:
        case "none":
            pass
        case "full" | "offload":
            checkpoint_blocks(stack.blocks)
        case "sqrt":
            checkpoint_segments(stack)
        case "every_n":
            checkpoint_blocks(stack.blocks[:: techniques.checkpoint_every])
        case "selective":
            hidden = techniques.compile and stack.is_whole_again
            assert not (hidden and any(techniques.kept_operations)), "compiled code hides operations: check_techniques"
            checkpoint_blocks(stack.blocks, techniques.kept_operations)


def apply_compile(stack: BlockStack) -> None:
    """Compile each block's forward; blocks of one class that keep the same share the compiled code.

    Rows of text have many lengths: from the second on, code is compiled that takes any. Images have a few sizes, of their
    buckets, and code made for one is faster.
    """
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MOST_FORMS)
    dynamo_config.accumulated_recompile_limit = max(dynamo_config.accumulated_recompile_limit, MOST_FORMS)
    compiled = partial(torch.compile, dynamic=False) if stack.compiles_each_shape else torch.compile
    for block in stack.blocks:
        wrap_forward(block.module, compiled)


def apply_resident(stack: BlockStack, techniques: Techniques, device: torch.device) -> Masters:
    """Allocate the whole model on `device`, under the same cast policy as a sharded one."""
    mixed = techniques.precision == "mixed-bf16"
    for block in (*stack.blocks, None):
        stack.materialise(device, block)
        if mixed:
            cast_frozen(stack.model if block is None else block.module)
    if mixed:
        cast_buffers(stack.model)
        return Masters.with_compute_copies(stack.model, torch.bfloat16)
    return Masters.of(stack.model)


def apply_fsdp(stack: BlockStack, techniques: Techniques, device: torch.device, mesh: DeviceMesh) -> Masters:
    """Shard each block, then the rest, over `mesh` (FSDP2: Zhao et al., arXiv:2304.11277, per parameter).

    Gradients are summed, not averaged: the loss is already divided by the valid count of the global batch. Offloaded masters are
    copied to the device and cast there each time a block is gathered; its reduced gradient goes to the host, where further
    micro-batches' are added to it.
    """
    mixed = techniques.precision == "mixed-bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy() if techniques.cpu_offload else OffloadPolicy()
    # FLUX.1's single blocks return parts of one tensor, and nothing here ever modifies a block's output in place
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    for block in stack.blocks:
        stack.materialise(device, block)
        if mixed:
            cast_frozen(block.module)
        fully_shard(
            block.module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=techniques.reshard_after_forward,
            offload_policy=offload,
        )
    stack.materialise(device, None)
    if mixed:
        cast_frozen(stack.model)
    fully_shard(stack, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in fsdp_modules(stack):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if mixed:
        cast_buffers(stack.model)
    return Masters.of(stack.model)


def fsdp_modules(stack: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards; none on a resident model."""
    return [module for module in stack.modules() if isinstance(module, FSDPModule)]


def abandon_forward(stack: nn.Module) -> None:
    """Let the next forward begin afresh after one that has failed on every rank."""
    if not isinstance(stack, FSDPModule):
        return
    if hasattr(stack, "reset_iter_state"):
        stack.reset_iter_state()
        return
    root = stack._get_fsdp_state()  # torch before 2.13
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._training_state = TrainingState.IDLE
    for module in fsdp_modules(stack):
        module.reshard()
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None


def cast_frozen(module: nn.Module) -> None:
    """Cast frozen parameters to bf16: they have no masters. Bytes, which are codes, stay."""
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.detach().to(torch.bfloat16)


def cast_buffers(model: nn.Module) -> None:
    """Cast persistent floating-point buffers to bf16."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                setattr(module, name, buffer.to(torch.bfloat16))
