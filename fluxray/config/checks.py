"""What no single key can know: contradictions between keys, and what a run needs beyond a plan."""

from fluxray.config.checks_adapter import check_adapter
from fluxray.config.checks_group import check_group
from fluxray.config.checks_sampling import check_sampling
from fluxray.config.checks_task import check_task
from fluxray.config.mirror import check_mirror
from fluxray.config.schema import BatchConfig, DataConfig, ProfileConfig, StreamEngineConfig, TrainConfig
from fluxray.errors import ConfigError


def check_consistent(config: TrainConfig) -> None:
    """Raise ConfigError for the first pair of keys that contradict each other."""
    batch, data = config.batch, config.data
    workers = config.resources.num_workers
    if batch.global_size not in (None, config.global_batch_size):
        raise ConfigError(
            f"batch.global_size: {batch.global_size} is not batch.micro_size {batch.micro_size} x batch.accumulation_steps "
            f"{batch.accumulation_steps} x resources.num_workers {workers} = {config.global_batch_size}; set two of the three"
        )
    check_task(config)
    check_sampling(config)
    check_adapter(config)
    if not data.source or data.eval_source == ():
        raise ConfigError(f"data.{'eval_source' if data.source else 'source'}: [] names no data; name some, or drop the key")
    if data.eval_source is not None and data.eval_fraction != DataConfig.model_fields["eval_fraction"].default:
        raise ConfigError("data.eval_fraction: has no effect beside data.eval_source; set one of them")
    if data.vocab_size is not None and data.tokenizer not in (None, "train"):
        raise ConfigError(
            f"data.vocab_size: {data.vocab_size} has no effect, data.tokenizer {data.tokenizer!r} is not trained; drop either"
        )
    _check_rows(config)
    _check_optim(config)
    _check_in_backward(config)
    if config.resources.gpu == 0 and config.allocator != "native":
        raise ConfigError(f"allocator: {config.allocator!r} is CUDA's, and resources.gpu is 0; set native")
    if config.resources.gpu == 0 and config.resources.accelerator is not None:
        raise ConfigError(
            f"resources.accelerator: {config.resources.accelerator!r} is a GPU, and resources.gpu is 0; set resources.gpu=1"
        )
    if workers > 1 and 0 < config.resources.gpu <= 1 / 2:
        raise ConfigError(
            f"resources.gpu: {config.resources.gpu:g} puts several of resources.num_workers {workers} on one card, and NCCL "
            f"wants one for each; set resources.gpu=1, or resources.num_workers=1 and "
            f"batch.accumulation_steps={batch.accumulation_steps * workers}"
        )
    _check_checkpointing(config)
    _check_profile(config)
    _check_cuda_graph(config)
    _check_stream(config)
    check_group(config)
    if config.storage is not None and not config.storage.startswith("/"):
        raise ConfigError(f"storage: {config.storage!r} is not an absolute path; workers run in other folders than you do")
    if config.checkpoint.mirror is not None:
        check_mirror(config.checkpoint.mirror)


def _check_rows(config: TrainConfig) -> None:
    """Check how rows come together in global batches and micro-batches."""
    data = config.data
    if data.length_grouping and data.packing:
        raise ConfigError(
            f"data.length_grouping: true, but packed rows all have data.max_slice {data.max_slice} tokens; "
            f"set data.packing=false, or drop it"
        )
    _check_dynamic(config)


def _check_dynamic(config: TrainConfig) -> None:
    batch = config.batch
    low, high = batch.min_micro_size, batch.max_micro_size
    if not batch.dynamic:
        for key in ("min_micro_size", "max_micro_size"):
            if getattr(batch, key) != BatchConfig.model_fields[key].default:
                raise ConfigError(
                    f"batch.{key}: {getattr(batch, key)} has no effect without batch.dynamic; set batch.dynamic=true, or drop it"
                )
        return
    if low > high:
        raise ConfigError(f"batch.min_micro_size: {low} is above batch.max_micro_size {high}; lower it, or raise the other")
    if not low <= batch.micro_size <= high:
        raise ConfigError(
            f"batch.micro_size: {batch.micro_size} is what batch.dynamic begins with, and not from batch.min_micro_size {low} to "
            f"batch.max_micro_size {high}; set it, or the bounds, so that it is"
        )
    if config.optim.in_backward:
        raise ConfigError(
            "batch.dynamic: true changes the number of micro-batches in a step, and optim.in_backward wants one; "
            "set one of the two to false"
        )
    if len(batch.dynamic_sizes) == 1:
        raise ConfigError(
            f"batch.dynamic: true, but of the sizes from batch.min_micro_size {low} to batch.max_micro_size {high} only "
            f"{batch.micro_size} divides the {batch.rank_rows} rows of a worker's step; set batch.accumulation_steps or the "
            f"bounds so that others do, or batch.dynamic=false"
        )


def _check_profile(config: TrainConfig) -> None:
    profile = config.profile
    if profile.first_step is None:
        if profile != ProfileConfig():
            raise ConfigError("profile.first_step: null, so the other keys of profile have no effect; set it, or drop them")
        return
    last = profile.first_step + profile.num_steps - 1
    if last > config.train.num_steps:
        raise ConfigError(
            f"profile.first_step: {profile.first_step} and profile.num_steps {profile.num_steps} end at step {last}, but "
            f"train.num_steps is {config.train.num_steps}; lower one of them"
        )
    if profile.record == "memory" and config.resources.gpu == 0:
        raise ConfigError(
            "profile.record: 'memory' is a history of CUDA's allocator, and resources.gpu is 0; set profile.record=time"
        )
    if profile.record == "memory" and config.allocator == "async":
        raise ConfigError(
            "profile.record: 'memory' is a history of torch's own allocator, and allocator is async; set allocator=expandable"
        )


def _check_checkpointing(config: TrainConfig) -> None:
    kind = config.activation_checkpoint
    wanted = {
        "activation_checkpoint_every": ("every_n", config.activation_checkpoint_every, "2"),
        "activation_checkpoint_budget": ("selective", config.activation_checkpoint_budget, "4GB"),
    }
    is_planned = kind == "selective" and config.activation_checkpoint_budget is None
    if is_planned and config.batch.dynamic:
        raise ConfigError(
            "activation_checkpoint: 'selective' fills what the plan leaves of a device, which batch.dynamic wants for larger "
            "micro-batches; set activation_checkpoint_budget=4GB, or batch.dynamic=false"
        )
    for key, (owner, value, example) in wanted.items():
        if kind == owner and value is None and not is_planned:
            raise ConfigError(f"activation_checkpoint: {kind!r} wants {key}; set it, such as {key}={example}")
        if kind != owner and value is not None:
            raise ConfigError(
                f"{key}: {value} has no effect with activation_checkpoint {kind}; drop it or set activation_checkpoint={owner}"
            )


def _check_cuda_graph(config: TrainConfig) -> None:
    if not config.cuda_graph:
        return
    if config.resources.gpu == 0:
        raise ConfigError("cuda_graph: true, and resources.gpu is 0; set cuda_graph=false, or resources.gpu=1")
    if config.engine.kind == "stream":
        raise ConfigError(
            "cuda_graph: true replays fixed addresses, and with engine.kind stream blocks pass through changing ones; set "
            "cuda_graph=false"
        )
    if config.resources.num_workers > 1:
        raise ConfigError(
            f"cuda_graph: true is for one worker, and resources.num_workers is {config.resources.num_workers}: FSDP gathers "
            f"parameters into memory that changes; set cuda_graph=false, or resources.num_workers=1"
        )
    if config.optim.in_backward:
        raise ConfigError(
            "cuda_graph: true adds gradients up in memory that stays, which optim.in_backward frees; set one of them to false"
        )
    if config.activation_checkpoint == "offload":
        raise ConfigError(
            "cuda_graph: true cannot hold the copies of activation_checkpoint offload, which are queued by the host; set "
            "activation_checkpoint=full, or cuda_graph=false"
        )


def _check_stream(config: TrainConfig) -> None:
    engine, workers = config.engine, config.resources.num_workers
    if not isinstance(engine, StreamEngineConfig):
        return
    if workers != 1:
        raise ConfigError(f"resources.num_workers: {workers}, but engine.kind stream uses one GPU; set 1, or engine.kind=sharded")
    if config.activation_checkpoint == "none":
        raise ConfigError(
            "activation_checkpoint: 'none', but engine.kind stream computes each block again in backward; set "
            "activation_checkpoint=full (engine.kept_blocks says how many keep their activations)"
        )
    if config.precision == "amp-fp16" and config.clip.mode != "exact":
        raise ConfigError(
            f"precision: 'amp-fp16' skips a step whose gradient overflows, and with engine.kind stream and clip.mode "
            f"{config.clip.mode} blocks have stepped before that is known; set clip.mode=exact, or precision=amp-bf16"
        )
    if config.optim.kind == "paged_adam8bit":
        raise ConfigError(
            "optim.kind: 'paged_adam8bit' lets states go to the host, where engine.kind stream keeps them anyway; set "
            "optim.kind=adam8bit"
        )
    if config.activation_checkpoint in ("sqrt", "every_n"):
        raise ConfigError(
            f"activation_checkpoint: {config.activation_checkpoint!r} joins blocks or spares some, but engine.kind stream runs "
            f"them one by one; set activation_checkpoint=full, and engine.kept_blocks for those that keep their activations"
        )


def _check_optim(config: TrainConfig) -> None:
    optim, train = config.optim, config.train
    if optim.kind == "paged_adam8bit" and config.engine.kind == "sharded" and config.resources.gpu == 0:
        raise ConfigError(
            "optim.kind: 'paged_adam8bit' uses CUDA's managed memory, and resources.gpu is 0; set optim.kind=adam8bit, or "
            "resources.gpu=1"
        )
    if optim.master != "fp32" and config.precision != "mixed-bf16":
        raise ConfigError(
            f"optim.master: {optim.master!r} is for bf16 weights, and precision is {config.precision}; "
            f"set precision=mixed-bf16, or optim.master=fp32"
        )
    if optim.schedule != "constant" and optim.warmup_steps >= max(train.num_steps, 1):
        raise ConfigError(
            f"optim.warmup_steps: {optim.warmup_steps} leaves nothing of train.num_steps {train.num_steps} for the "
            f"{optim.schedule} schedule; lower it or set optim.schedule=constant"
        )
    if optim.schedule == "constant" and optim.min_lr_ratio != 0:
        raise ConfigError(
            f"optim.min_lr_ratio: {optim.min_lr_ratio} has no effect with optim.schedule constant; set linear or cosine"
        )


def _check_in_backward(config: TrainConfig) -> None:
    if not config.optim.in_backward:
        return
    if config.engine.kind == "stream":
        raise ConfigError(
            "optim.in_backward: true is what engine.kind stream does by itself where clip.mode allows it; set "
            "optim.in_backward=false"
        )
    if config.clip.mode == "exact":
        raise ConfigError(
            "optim.in_backward: true steps before the norm of the whole gradient is known, by which clip.mode exact clips; set "
            "clip.mode=previous or clip.mode=block"
        )
    if config.precision == "amp-fp16":
        raise ConfigError(
            "optim.in_backward: true has stepped before it is known whether a gradient overflows, which precision amp-fp16 must "
            "know; set precision=amp-bf16, or optim.in_backward=false"
        )
    if config.batch.accumulation_steps > 1:
        raise ConfigError(
            f"optim.in_backward: true frees gradients at once, and batch.accumulation_steps {config.batch.accumulation_steps} "
            f"adds them up first; set batch.accumulation_steps=1 (and a larger batch.micro_size), or optim.in_backward=false"
        )


def check_available(config: TrainConfig) -> None:
    """Raise ConfigError for the first value that can be planned with and not run."""
    if config.task.kind == "flow" and config.data.source != DataConfig.model_fields["source"].default:
        raise ConfigError(
            f"data.source: {config.data.source!r} is what `fluxray encode` reads, training reads data.cache; drop it"
        )
    if config.task.kind == "flow" and config.data.cache is None:
        raise ConfigError("data.cache: null, but task.kind flow trains on encoded images and texts; set data.cache=FOLDER")
    if config.engine.kind == "sharded" and config.optim.master != "fp32":
        raise ConfigError(
            f"optim.master: {config.optim.master!r} saves host memory for engine.kind stream; the weights of engine.kind sharded "
            f"are fp32 masters already; set optim.master=fp32"
        )
