"""The rivals: how each of PyTorch's ways to keep the optimizer state off the device is set up and takes a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.cases import ADAMW, Case
from benchmarks.in_torch.gpt import build


class Unavailable(Exception):
    """This case does not run with this system; the message says why."""


class Rival(NamedTuple):
    """
    Attributes:
      step: trains on int64[batch, context + 1] tokens and returns the loss before the update.
      package: whose version is reported.
    """

    step: Callable[[Tensor], Tensor]
    notes: list[str]
    package: str = "torch"


def adamw(**options: Any) -> dict[str, Any]:
    """The optimizer's hyperparameters under PyTorch's names."""
    a = ADAMW
    return dict(
        lr=a["learning_rate"], betas=(a["b1"], a["b2"]), eps=a["eps"], weight_decay=a["weight_decay"], **options
    )


def compute_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs CUDA")


def trainer(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool
) -> Callable[[Tensor], Tensor]:
    """The usual loop: clipping between the backward pass and the update."""

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast and tokens.is_cuda):
            loss = model(tokens)
        loss.backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def resident(case: Case, device: torch.device) -> Rival:
    model = build(case.shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw(fused=device.type == "cuda"))
    return Rival(trainer(case, model, optimizer, autocast=True), ["eager; float32 parameters, bfloat16 autocast"])


def torchao(case: Case, device: torch.device, bf16: bool = False) -> Rival:
    from torchao.optim import CPUOffloadOptimizer

    if case.clip:
        # A hook copies each gradient to the host as soon as it is there; those copies, which the update reads, cannot
        # be scaled by a norm that is known when the last one has gone. Its README: not supported.
        raise Unavailable("no exact clipping: gradients leave for the host before their norm is known")
    need_cuda(device)
    offload_gradients = case.options.get("offload_gradients", False)
    model = build(case.shape, device, torch.bfloat16 if bf16 else torch.float32)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, **adamw(fused=True)
    )
    precision = "bfloat16 parameters and moments, no masters" if bf16 else "float32 parameters, bfloat16 autocast"
    notes = [f"eager; {precision}; offload_gradients={offload_gradients}; parameters under 4096 numbers on the device"]
    return Rival(trainer(case, model, optimizer, autocast=not bf16), notes, "torchao")


def torchao_bf16(case: Case, device: torch.device) -> Rival:
    return torchao(case, device, bf16=True)


def one_process(backend: str) -> None:
    """A process group of this process alone, which needs no network and no launcher."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def deepspeed(case: Case, device: torch.device) -> Rival:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    one_process("nccl" if device.type == "cuda" else "gloo")
    dtype = compute_dtype(device)
    model = build(case.shape, device, dtype)
    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0 if case.clip else 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "steps_per_print": 2**31,
        **case.options.get("config", {}),
    }
    optimizer = DeepSpeedCPUAdam(model.parameters(), **adamw(adamw_mode=True))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor) -> Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    notes = ["ZeRO stage 2; bfloat16 parameters and gradients; float32 masters, begun from bfloat16, on the host"]
    return Rival(step, notes, "deepspeed")


def fsdp2(case: Case, device: torch.device) -> Rival:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_cuda = device.type == "cuda"
    one_process("cpu:gloo,cuda:nccl" if on_cuda else "gloo")  # gradients are on the host when they are clipped
    mesh = dist.init_device_mesh(device.type, (1,))
    precision = MixedPrecisionPolicy(compute_dtype(device), torch.float32)
    offload = CPUOffloadPolicy(pin_memory=on_cuda)
    model = build(
        case.shape,
        device,
        wrap=lambda module: fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload),
    )
    optimizer = torch.optim.AdamW(model.parameters(), **adamw(fused=True))
    notes = [
        "eager; float32 parameters, gradients and moments on the host; bfloat16 copies on the device, a block's at"
        " a time; a mesh of one device"
    ]
    return Rival(trainer(case, model, optimizer, autocast=False), notes)


def bitsandbytes(case: Case, device: torch.device, bits: int = 32) -> Rival:
    import bitsandbytes as bnb

    need_cuda(device)
    # To ask for more managed memory than is free can hang a device: rather not run.
    state = bits // 4 * case.shape.parameters
    activations = 2 * case.tokens * case.shape.width * case.shape.layers
    needed = 8 * case.shape.parameters + state + activations
    free = torch.cuda.mem_get_info()[0]
    if needed > 0.8 * free:
        raise Unavailable(
            f"not tried: {needed / 2**30:.0f} GiB with the state, over 80 % of the device's {free / 2**30:.0f}"
        )
    kind = bnb.optim.PagedAdamW32bit if bits == 32 else bnb.optim.PagedAdamW8bit
    model = build(case.shape, device)
    optimizer = kind(model.parameters(), **adamw())
    notes = ["eager; float32 parameters, bfloat16 autocast; the state is in managed memory, which the peak leaves out"]
    return Rival(trainer(case, model, optimizer, autocast=True), notes, "bitsandbytes")


def bitsandbytes_8bit(case: Case, device: torch.device) -> Rival:
    return bitsandbytes(case, device, bits=8)


def megatron(case: Case, device: torch.device) -> Rival:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    need_cuda(device)
    model = build(case.shape, device)
    fraction = case.options.get("offload_fraction", 1.0)
    optimizer = HybridDeviceOptimizer(
        list(model.parameters()),
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        pin_cpu_grads=True,
        pin_cpu_params=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        **adamw(fused=True),
    )
    notes = [f"eager; float32 parameters, bfloat16 autocast; offload_fraction={fraction}; without Megatron's own model"]
    return Rival(trainer(case, model, optimizer, autocast=True), notes, "megatron-core")


SYSTEMS: dict[str, Callable[[Case, torch.device], Rival]] = {
    "torch resident": resident,
    "torchao CPUOffloadOptimizer": torchao,
    "torchao CPUOffloadOptimizer, bf16 parameters": torchao_bf16,
    "DeepSpeed ZeRO-Offload": deepspeed,
    "FSDP2 CPUOffloadPolicy": fsdp2,
    "bitsandbytes PagedAdamW": bitsandbytes,
    "bitsandbytes PagedAdamW8bit": bitsandbytes_8bit,
    "Megatron HybridDeviceOptimizer": megatron,
}
