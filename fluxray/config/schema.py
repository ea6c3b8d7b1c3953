"""The configuration of a run, as frozen values. Unknown keys, wrong types and contradictions are refused when it is built.

A default stands here only where it holds for every model and every machine; what belongs to a model is in `models/*.yaml`, what
belongs to a hardware shape in `profiles/*.yaml`. Keys are the dotted paths through these classes: `optim.lr`, `data.max_slice`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from fluxray.config.adapter import LoraConfig, NoAdapterConfig
from fluxray.config.encode import EncodeConfig
from fluxray.config.quantities import RATE, SIZE
from fluxray.config.sampling import EmaConfig, SampleConfig
from fluxray.config.section import Section
from fluxray.config.tasks import FlowTaskConfig, LmTaskConfig

Kernel = Literal["flash", "efficient", "math", "cudnn", "flex", "varlen"]
"""What computes attention: `fluxray/models/attention.py` describes them."""
CheckpointKind = Literal["none", "full", "sqrt", "every_n", "selective", "offload"]


class ModelConfig(Section):
    """Which model. `weights` loads published ones; without it the model is initialised at random from `config`."""

    config: dict[str, Any] = Field(default={}, description="keys of the library's config.json; or the path of such a file")
    weights: str | None = Field(
        default=None, description="path:DIR or hf:NAME; its config.json is the model's; FLUX: a pipeline or a single file, too"
    )
    fused_qkv: bool = Field(default=False, description="one projection in place of an attention's three; saved as three")


class ShardedEngineConfig(Section):
    """FSDP2 over all workers; on one worker, plain resident training under the same cast policy."""

    kind: Literal["sharded"] = "sharded"
    reshard_after_forward: bool = Field(
        default=True, description="free a block's gathered parameters after its forward (less memory, one more gather)"
    )
    cpu_offload: bool = Field(
        default=False,
        description="masters, gradients and optimizer states wait in host memory and are stepped there: larger batches, slower",
    )


class StreamEngineConfig(Section):
    """One GPU, blocks streamed from host memory. What is left open the memory plan decides."""

    kind: Literal["stream"] = "stream"
    resident_blocks: int | None = Field(
        default=None, ge=0, description="blocks that stay on the GPU and have no host copy; default: planned"
    )
    kept_blocks: int | None = Field(
        default=None,
        ge=0,
        description="blocks before the last that keep their activations instead of computing them again; default: planned",
    )
    weight_slots: int = Field(default=3, ge=1, description="places on the GPU through which the blocks' weights pass")
    state_slots: int = Field(default=3, ge=1, description="places on the GPU through which their optimizer states pass")


class DataConfig(Section):
    """Where the text comes from and how it becomes rows of tokens; for task.kind flow, the caches of latents and texts.

    With flow `cache`, `eval_cache`, `prior_cache` and `eval_fraction` count; `source` where pictures are encoded,
    and `resolution` and `text_tokens` where a plan is made without a cache.
    """

    source: str | tuple[str, ...] = Field(
        default="builtin:topics",
        description="builtin:topics, path:FILE-OR-GLOB or hf:NAME[:CONFIG[:SPLIT]]; of pictures folder:DIR, "
        "parquet:FILE-OR-GLOB, tars:GLOB (also s3://, gs://, https://) or hf:...; one or a list",
    )
    eval_source: str | tuple[str, ...] | None = Field(
        default=None, description="held-out data, same forms; without it eval_fraction of source is held out"
    )
    eval_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of the tokens held out, by whole documents; of the images of a cache"
    )
    text_key: str = Field(default="text", description="field of jsonl, parquet and hf rows that holds the text")
    tokenizer: str | None = Field(
        default=None, description="train, path:DIR or hf:NAME; default: that of model.weights, else trained on the source"
    )
    vocab_size: int | None = Field(
        default=None, ge=258, description="size of a trained tokenizer; default: the model's vocab_size"
    )
    packing: bool = Field(default=True, description="fill each row with several documents; otherwise pad rows to the longest")
    length_grouping: bool = Field(
        default=False, description="without packing: rows of similar length share a global batch, which leaves little padding"
    )
    max_slice: int = Field(default=512, ge=2, description="tokens in a row; longer documents are cut")
    cache: str | None = Field(
        default=None, description="flow: folder of encoded images and texts to train on, also s3://, gs:// or https://"
    )
    eval_cache: str | None = Field(
        default=None, description="flow: folder of held-out ones; without it eval_fraction of cache is held out"
    )
    prior_cache: str | None = Field(
        default=None, description="flow: folder of regularisation ones, which make up half of each global batch"
    )
    resolution: int | None = Field(
        default=None,
        ge=16,
        description="flow, for a plan without a cache: pixels a side of an image; default: 1024",
    )
    text_tokens: int | None = Field(
        default=None, ge=1, description="flow, for a plan without a cache: tokens of a text; default: 512"
    )


class BatchConfig(Section):
    """Rows per micro-batch and worker, micro-batches per step; their product with the number of workers is the global size."""

    micro_size: int = Field(default=8, ge=1)
    accumulation_steps: int = Field(default=4, ge=1)
    global_size: int | None = Field(default=None, ge=1, description="only checked: micro_size x accumulation_steps x workers")
    dynamic: bool = Field(
        default=False, description="cut the same global batch into larger or smaller micro-batches, as the device has memory"
    )
    min_micro_size: int = Field(default=4, ge=1, description="with dynamic: smallest size; it begins with micro_size")
    max_micro_size: int = Field(default=16, ge=1, description="with dynamic: largest size, and most rows where rows are short")

    @property
    def rank_rows(self) -> int:
        """Rows of one step on one worker."""
        return self.micro_size * self.accumulation_steps

    @property
    def dynamic_sizes(self) -> tuple[int, ...]:
        """The sizes within the bounds, rising, that cut a worker's rows of a step evenly."""
        bounds = range(self.min_micro_size, self.max_micro_size + 1)
        return tuple(size for size in bounds if self.rank_rows % size == 0)


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    kind: Literal["adamw", "adam8bit", "paged_adam8bit"] = Field(
        default="adamw", description="AdamW with fp32 or with 8-bit moments; paged: these leave a full GPU for the host"
    )
    lr: float = Field(default=5e-5, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled; not applied to 1-D parameters")
    in_backward: bool = Field(default=False, description="step each block as soon as backward has its gradient, and free that")
    master: Literal["fp32", "split24", "stochastic"] = Field(
        default="fp32", description="of the model's own parameters: with 32, 24 or 16 bits; those of adapters have 32"
    )
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=100, ge=0)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="where linear and cosine end, as a share of lr")

    @property
    def has_8_bit_moments(self) -> bool:
        """Whether the moments of large matrices are 8-bit codes."""
        return self.kind != "adamw"


class LossConfig(Section):
    """How the loss is taken."""

    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens whose logits exist at once; default: engine.kind stream plans it, at most 2048, sharded takes all",
    )


class ClipConfig(Section):
    """Clipping of gradients by their norm."""

    mode: Literal["exact", "previous", "block"] = Field(
        default="exact",
        description="by the norm of: the whole gradient; an average of the steps before, each block at most; each block alone",
    )
    max_norm: float = Field(default=1.0, gt=0)


class TrainLoopConfig(Section):
    """How long, and how often something is said."""

    num_steps: int = Field(default=1000, ge=0)
    log_every: int = Field(default=10, ge=1)
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="a step whose loss or gradient is not finite changes nothing; end the run there, or go on"
    )
    on_oom: Literal["ladder", "stop"] = Field(
        default="ladder",
        description="when a device has not the memory: go on from the last checkpoint with smaller micro-batches, then with less "
        "kept; or end the run there",
    )


class EvaluationConfig(Section):
    """Loss on the held-out split, always at the end, and every `every_steps` if that is not 0."""

    every_steps: int = Field(default=0, ge=0)
    max_rows: int = Field(default=1024, ge=1, description="rows of the held-out split that are used, the same each time")


class CheckpointConfig(Section):
    """When the run is saved, and how many checkpoints are kept."""

    every_steps: int = Field(default=200, ge=1)
    asynchronous: bool = Field(
        default=True,
        description="write while training goes on, from a copy in host memory; engine.kind stream has no room for one and waits",
    )
    keep: int = Field(default=2, ge=1)
    mirror: str | None = Field(
        default=None,
        description="s3://BUCKET/PREFIX, gs:// or file:///FOLDER: an object store that gets a copy of each checkpoint",
    )


class ResourcesConfig(Section):
    """What each worker asks of the cluster."""

    num_workers: int = Field(default=1, ge=1)
    cpu: float = Field(default=1.0, gt=0, description="CPUs a worker")
    gpu: float = Field(default=0.0, ge=0, description="GPUs a worker")
    accelerator: str | None = Field(default=None, description="Ray's name of the GPU, such as RTX-A6000 or A100")
    label_selector: dict[str, str] = Field(default={}, description="labels that a worker's node must carry")
    wait_s: int = Field(
        default=0, ge=0, description="seconds to wait for nodes that an autoscaler starts; 0 refuses what is not there at once"
    )
    collective_timeout_s: float = Field(default=600, gt=0, description="seconds after which ranks stop waiting for a lost one")
    max_failures: int = Field(default=3, ge=0, description="restarts from the last checkpoint after a lost worker or controller")


class HardwareConfig(Section):
    """What the hardware can do. What is left open is read from the machine or measured on it."""

    tflops: float | None = Field(
        default=None, gt=0, description="matrix TFLOPS that one device attains; default: measured at start"
    )
    device_memory: Annotated[int | None, SIZE] = Field(
        default=None, gt=0, description="of one device that a worker may use, CUDA context included; default: all of it"
    )
    host_memory: Annotated[int | None, SIZE] = Field(default=None, gt=0, description="of one host; default: what the system says")
    link: Annotated[int | None, RATE] = Field(
        default=None, gt=0, description="between host and device, each way with both in use; default: measured"
    )
    memory_bandwidth: Annotated[int | None, RATE] = Field(
        default=None, gt=0, description="of the device's own memory; default: measured"
    )
    disk: Annotated[int | None, SIZE] = Field(
        default=None, gt=0, description="free bytes for checkpoints; default: the plan sets no limit"
    )


class ProfileConfig(Section):
    """Steps that are looked at closely; what is recorded lies in the run's folder and in MLflow."""

    first_step: int | None = Field(default=None, ge=1, description="the first of them; default: none is")
    num_steps: int = Field(default=3, ge=1)
    record: Literal["time", "memory"] = Field(
        default="time", description="a trace of the operations for chrome://tracing; a memory snapshot for pytorch.org/memory_viz"
    )


class TrackingConfig(Section):
    """Where MLflow records the run."""

    uri: str | None = Field(default=None, description="MLflow tracking server or database; default: sqlite in the storage folder")
    experiment: str = "fluxray"
    system_metrics_s: int = Field(default=10, ge=0, description="seconds between readings of CPU, GPU and memory load; 0: none")


class TrainConfig(Section):
    """The whole configuration of one run."""

    name: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$", description="a run of that name is resumed"
    )
    storage: str | None = Field(default=None, description="absolute folder of runs and caches; default: FLUXRAY_HOME, ~/.fluxray")
    seed: int = Field(default=0, ge=0)
    deterministic: bool = Field(default=False, description="bit-equal repetition on a GPU, at a cost in speed")
    precision: Literal["fp32", "amp-bf16", "amp-fp16", "mixed-bf16"] = Field(
        default="fp32",
        description="amp-...: fp32 weights, autocast to 16 bits, for fp16 with a scaled loss; mixed-bf16: bf16 copies of them",
    )
    activation_checkpoint: CheckpointKind = Field(
        default="none", description="which activations are computed again in backward, or wait on the host, instead of being kept"
    )
    activation_checkpoint_every: int | None = Field(
        default=None, ge=2, description="every_n: the n; one block of so many keeps only its input, the others everything"
    )
    activation_checkpoint_budget: Annotated[int | None, SIZE] = Field(
        default=None,
        gt=0,
        description="selective: bytes a rank for results that are dear to compute again; default: what the plan leaves",
    )
    attention: Literal["auto"] | Kernel = Field(
        default="auto", description="what computes attention; auto: the fastest kernel that the run and its GPU allow"
    )
    compile: bool = False
    cuda_graph: bool = Field(
        default=False, description="launch forward and backward of a micro-batch as one CUDA graph per shape; one GPU, no dropout"
    )
    allocator: Literal["native", "expandable", "async"] = "native"
    model: ModelConfig = ModelConfig()
    task: Annotated[LmTaskConfig | FlowTaskConfig, Field(discriminator="kind")] = LmTaskConfig()
    engine: Annotated[ShardedEngineConfig | StreamEngineConfig, Field(discriminator="kind")] = ShardedEngineConfig()
    data: DataConfig = DataConfig()
    encode: EncodeConfig = EncodeConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    adapter: Annotated[NoAdapterConfig | LoraConfig, Field(discriminator="kind")] = NoAdapterConfig()
    ema: EmaConfig = EmaConfig()
    loss: LossConfig = LossConfig()
    clip: ClipConfig = ClipConfig()
    train: TrainLoopConfig = TrainLoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resources: ResourcesConfig = ResourcesConfig()
    hardware: HardwareConfig = HardwareConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def trained_optim(self) -> OptimConfig:
        """The optimizer of what is trained: adapters are few and have fp32 masters, whatever the model's own parameters have."""
        is_adapted = isinstance(self.adapter, LoraConfig)
        return self.optim.model_copy(update={"master": "fp32"}) if is_adapted else self.optim

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step over all workers."""
        return self.batch.micro_size * self.batch.accumulation_steps * self.resources.num_workers
