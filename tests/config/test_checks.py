import pytest

from fluxray.config.checks import check_available
from fluxray.config.load import resolve
from fluxray.errors import ConfigError

CONTRADICTIONS = {
    ("batch.global_size=10",): (
        "batch.global_size: 10 is not batch.micro_size 8 x batch.accumulation_steps 4 x resources.num_workers 1 = 32; "
        "set two of the three"
    ),
    ("data.eval_source=path:x", "data.eval_fraction=0.1"): (
        "data.eval_fraction: has no effect beside data.eval_source; set one of them"
    ),
    ("data.vocab_size=300", "data.tokenizer=path:tok"): (
        "data.vocab_size: 300 has no effect, data.tokenizer 'path:tok' is not trained; drop either"
    ),
    ("task.kind=flow", "model.config.model_type=llama"): (
        "task.kind: 'flow', but model.config.model_type 'llama' is a language model; set task.kind=lm"
    ),
    ("model.config._class_name=FluxTransformer2DModel",): (
        "task.kind: 'lm', but model.config._class_name 'FluxTransformer2DModel' is an image model; set task.kind=flow"
    ),
    ("data.cache=photos",): (
        "data.cache: 'photos' has no effect with task.kind lm, which reads data.source; drop it, or set task.kind=flow"
    ),
    ("data.eval_cache=photos",): (
        "data.eval_cache: 'photos' has no effect with task.kind lm, which reads data.source; drop it, or set task.kind=flow"
    ),
    ("data.resolution=512",): "data.resolution: 512 is of images, and task.kind is lm; drop it",
    ("task.kind=flow", "data.cache=photos", "data.text_tokens=256"): (
        "data.text_tokens: 256 has no effect beside data.cache, whose images and texts have their own sizes; drop one of them"
    ),
    ("task.kind=flow", "data.resolution=500"): (
        "data.resolution: 500 is not a multiple of 16, the pixels of a token; use 496 or 512"
    ),
    ("task.kind=flow", "task.mode_scale=1"): (
        "task.mode_scale: 1 has no effect with task.timesteps logit_normal; drop it or set task.timesteps=mode"
    ),
    ("task.kind=flow", "task.timesteps=mode", "task.timestep_std=2"): (
        "task.timestep_std: 2 has no effect with task.timesteps mode; drop it or set task.timesteps=logit_normal"
    ),
    ("task.kind=flow", "data.source=path:x"): (
        "data.source: is of text, and task.kind flow reads images and texts from data.cache; drop it"
    ),
    ("task.kind=flow", "data.source=[folder:x,path:y]"): (
        "data.source: is of text, and task.kind flow reads images and texts from data.cache; drop it"
    ),
    ("encode.mask=file",): "encode.mask: 'file' is of pictures, and task.kind is lm; drop it, or set task.kind=flow",
    ("task.kind=flow", "encode.resolution=[]"): (
        "encode.resolution: [] names no size; set one, such as encode.resolution=1024"
    ),
    ("task.kind=flow", "encode.resolution=[512,48]"): (
        "encode.resolution: 48 is below encode.bucket_step 64; set encode.bucket_step=16"
    ),
    ("task.kind=flow", "encode.resolution=8"): "encode.resolution: 8 is below encode.bucket_step 64; set at least 16",
    ("task.kind=flow", "data.packing=false"): (
        "data.packing: is of text, and task.kind flow reads images and texts from data.cache; drop it"
    ),
    ("task.kind=flow", "data.eval_cache=a", "data.eval_fraction=0.1"): (
        "data.eval_fraction: has no effect beside data.eval_cache; set one of them"
    ),
    ("task.kind=flow", "loss.chunk_tokens=64"): (
        "loss.chunk_tokens: 64 cuts the logits of a language model, and task.kind is flow; drop it"
    ),
    ("task.kind=flow", "batch.dynamic=true"): (
        "batch.dynamic: true is for rows of text, and task.kind is flow; set batch.dynamic=false"
    ),
    ("task.kind=flow", "attention=varlen"): (
        "attention: 'varlen' keeps packed documents apart, and the images of task.kind flow are not packed; set attention=auto, "
        "or attention=flash"
    ),
    ("task.kind=flow", "task.guidance=3.5", "model.config.guidance_embeds=false"): (
        "task.guidance: 3.5 has no effect, since model.config.guidance_embeds is false; drop it"
    ),
    ("data.length_grouping=true",): (
        "data.length_grouping: true, but packed rows all have data.max_slice 512 tokens; set data.packing=false, or drop it"
    ),
    ("batch.max_micro_size=32",): (
        "batch.max_micro_size: 32 has no effect without batch.dynamic; set batch.dynamic=true, or drop it"
    ),
    ("batch.dynamic=true", "batch.min_micro_size=32"): (
        "batch.min_micro_size: 32 is above batch.max_micro_size 16; lower it, or raise the other"
    ),
    ("batch.dynamic=true", "optim.in_backward=true", "clip.mode=block", "batch.accumulation_steps=1"): (
        "batch.dynamic: true changes the number of micro-batches in a step, and optim.in_backward wants one; "
        "set one of the two to false"
    ),
    ("batch.dynamic=true", "batch.micro_size=2"): (
        "batch.micro_size: 2 is what batch.dynamic begins with, and not from batch.min_micro_size 4 to batch.max_micro_size 16; "
        "set it, or the bounds, so that it is"
    ),
    ("batch.dynamic=true", "batch.micro_size=7", "batch.accumulation_steps=1"): (
        "batch.dynamic: true, but of the sizes from batch.min_micro_size 4 to batch.max_micro_size 16 only 7 divides the 7 rows "
        "of a worker's step; set batch.accumulation_steps or the bounds so that others do, or batch.dynamic=false"
    ),
    ("data.source=[]",): "data.source: [] names no data; name some, or drop the key",
    ("data.eval_source=[]",): "data.eval_source: [] names no data; name some, or drop the key",
    ("optim.schedule=cosine", "train.num_steps=100"): (
        "optim.warmup_steps: 100 leaves nothing of train.num_steps 100 for the cosine schedule; "
        "lower it or set optim.schedule=constant"
    ),
    ("optim.min_lr_ratio=0.1",): (
        "optim.min_lr_ratio: 0.1 has no effect with optim.schedule constant; set linear or cosine"
    ),
    ("allocator=async",): "allocator: 'async' is CUDA's, and resources.gpu is 0; set native",
    ("resources.accelerator=A100",): "resources.accelerator: 'A100' is a GPU, and resources.gpu is 0; set resources.gpu=1",
    ("resources.gpu=0.5", "resources.num_workers=2"): (
        "resources.gpu: 0.5 puts several of resources.num_workers 2 on one card, and NCCL wants one for each; "
        "set resources.gpu=1, or resources.num_workers=1 and batch.accumulation_steps=8"
    ),
    ("engine.kind=stream", "resources.num_workers=2"): (
        "resources.num_workers: 2, but engine.kind stream uses one GPU; set 1, or engine.kind=sharded"
    ),
    ("engine.kind=stream", "activation_checkpoint=none"): (
        "activation_checkpoint: 'none', but engine.kind stream computes each block again in backward; set "
        "activation_checkpoint=full (engine.kept_blocks says how many keep their activations)"
    ),
    ("engine.kind=stream", "activation_checkpoint=sqrt"): (
        "activation_checkpoint: 'sqrt' joins blocks or spares some, but engine.kind stream runs them one by one; set "
        "activation_checkpoint=full, and engine.kept_blocks for those that keep their activations"
    ),
    ("profile.num_steps=2",): "profile.first_step: null, so the other keys of profile have no effect; set it, or drop them",
    ("profile.first_step=9", "train.num_steps=10"): (
        "profile.first_step: 9 and profile.num_steps 3 end at step 11, but train.num_steps is 10; lower one of them"
    ),
    ("profile.first_step=2", "profile.record=memory"): (
        "profile.record: 'memory' is a history of CUDA's allocator, and resources.gpu is 0; set profile.record=time"
    ),
    ("profile.first_step=2", "profile.record=memory", "resources.gpu=1", "allocator=async"): (
        "profile.record: 'memory' is a history of torch's own allocator, and allocator is async; set allocator=expandable"
    ),
    ("activation_checkpoint=every_n",): (
        "activation_checkpoint: 'every_n' wants activation_checkpoint_every; set it, such as activation_checkpoint_every=2"
    ),
    ("activation_checkpoint=selective", "batch.dynamic=true"): (
        "activation_checkpoint: 'selective' fills what the plan leaves of a device, which batch.dynamic wants for larger "
        "micro-batches; set activation_checkpoint_budget=4GB, or batch.dynamic=false"
    ),
    ("activation_checkpoint_budget=1GB",): (
        "activation_checkpoint_budget: 1000000000 has no effect with activation_checkpoint none; drop it or set "
        "activation_checkpoint=selective"
    ),
    ("optim.master=split24",): (
        "optim.master: 'split24' is for bf16 weights, and precision is fp32; set precision=mixed-bf16, or optim.master=fp32"
    ),
    ("precision=amp-fp16", "engine.kind=stream", "activation_checkpoint=full", "clip.mode=block"): (
        "precision: 'amp-fp16' skips a step whose gradient overflows, and with engine.kind stream and clip.mode block blocks "
        "have stepped before that is known; set clip.mode=exact, or precision=amp-bf16"
    ),
    ("optim.kind=paged_adam8bit",): (
        "optim.kind: 'paged_adam8bit' uses CUDA's managed memory, and resources.gpu is 0; set optim.kind=adam8bit, or "
        "resources.gpu=1"
    ),
    ("optim.kind=paged_adam8bit", "engine.kind=stream", "activation_checkpoint=full", "resources.gpu=1"): (
        "optim.kind: 'paged_adam8bit' lets states go to the host, where engine.kind stream keeps them anyway; set "
        "optim.kind=adam8bit"
    ),
    ("optim.in_backward=true", "engine.kind=stream", "activation_checkpoint=full"): (
        "optim.in_backward: true is what engine.kind stream does by itself where clip.mode allows it; set optim.in_backward=false"
    ),
    ("optim.in_backward=true",): (
        "optim.in_backward: true steps before the norm of the whole gradient is known, by which clip.mode exact clips; set "
        "clip.mode=previous or clip.mode=block"
    ),
    ("optim.in_backward=true", "clip.mode=block", "precision=amp-fp16"): (
        "optim.in_backward: true has stepped before it is known whether a gradient overflows, which precision amp-fp16 must "
        "know; set precision=amp-bf16, or optim.in_backward=false"
    ),
    ("optim.in_backward=true", "clip.mode=previous"): (
        "optim.in_backward: true frees gradients at once, and batch.accumulation_steps 4 adds them up first; set "
        "batch.accumulation_steps=1 (and a larger batch.micro_size), or optim.in_backward=false"
    ),
    ("storage=runs",): "storage: 'runs' is not an absolute path; workers run in other folders than you do",
}  # fmt: skip

NOT_YET = {
    ("task.kind=flow",): ("data.cache: null, but task.kind flow trains on encoded images and texts; set data.cache=FOLDER"),
    ("task.kind=flow", "data.source=folder:photos", "data.cache=x"): (
        "data.source: 'folder:photos' is what `fluxray encode` reads, training reads data.cache; drop it"
    ),
    ("optim.master=split24", "precision=mixed-bf16"): (
        "optim.master: 'split24' saves host memory for engine.kind stream; the weights of engine.kind sharded are fp32 masters "
        "already; set optim.master=fp32"
    ),
}


@pytest.mark.parametrize(("words", "message"), CONTRADICTIONS.items())
def test_contradicting_keys_are_refused(words, message):
    with pytest.raises(ConfigError) as refused:
        resolve(overrides=words)
    assert str(refused.value) == message


def test_consistent_keys_pass():
    assert resolve(overrides=["batch.global_size=64", "resources.num_workers=2"]).global_batch_size == 64
    assert resolve(overrides=["batch.dynamic=true", "batch.accumulation_steps=3"]).batch.dynamic_sizes == (4, 6, 8, 12)
    resolve(overrides=["data.length_grouping=true", "data.packing=false"])
    resolve(overrides=["data.vocab_size=300", "data.tokenizer=train"])
    resolve(model="flux1-tiny", overrides=["data.cache=a", "data.eval_cache=b", "task.timesteps=mode", "task.mode_scale=1"])
    resolve(model="flux1-tiny", overrides=["data.cache=a", "data.eval_fraction=0.1", "attention=flash", "task.guidance=3.5"])
    resolve(overrides=["allocator=async", "resources.gpu=1", "resources.accelerator=RTX-A6000"])
    resolve(overrides=["resources.gpu=0.25"])
    resolve(overrides=["resources.gpu=1", "optim.kind=paged_adam8bit"])
    resolve(overrides=["optim.in_backward=true", "clip.mode=block", "batch.accumulation_steps=1"])
    resolve(overrides=["resources.gpu=0.75", "resources.num_workers=2"])  # no two of them fit on one card


@pytest.mark.parametrize("key", ["max_slice=64", "length_grouping=true", "tokenizer=train", "text_key=t", "eval_source=path:x"])
def test_keys_of_text_are_not_ignored_by_flow(key):
    with pytest.raises(ConfigError, match=rf"^data\.{key.partition('=')[0]}: is of text"):
        resolve(overrides=["task.kind=flow", f"data.{key}"])


def test_the_folder_of_published_weights_tells_their_kind(tmp_path):
    pipeline, transformer, text = tmp_path / "pipeline", tmp_path / "transformer", tmp_path / "text"
    for folder, name, content in (
        (pipeline, "model_index.json", "{}"),
        (transformer, "config.json", '{"_class_name": "FluxTransformer2DModel"}'),
        (text, "config.json", '{"model_type": "llama"}'),
    ):
        folder.mkdir()
        (folder / name).write_text(content)
    for folder in (pipeline, transformer):
        assert resolve(model=f"path:{folder}", overrides=["task.kind=flow"]).task.kind == "flow"
        assert resolve(model="flux1-dev", overrides=[f"model.weights=path:{folder}"]).task.kind == "flow"
        with pytest.raises(ConfigError) as refused:
            resolve(model=f"path:{folder}")
        assert str(refused.value) == (
            f"task.kind: 'lm', but model.weights path:{folder} is an image model, as its folder says; set task.kind=flow, or "
            f"choose its preset, such as --model flux1-dev"
        )
    assert resolve(model=f"path:{text}").task.kind == "lm"
    with pytest.raises(ConfigError, match=r"is a language model, as its folder says; set task\.kind=lm$"):
        resolve(model=f"path:{text}", overrides=["task.kind=flow"])
    assert resolve(model="path:/none").task.kind == resolve(model="hf:EleutherAI/pythia-14m").task.kind == "lm"


GRAPH = ("cuda_graph=true", "resources.gpu=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resources.gpu=0"], "cuda_graph: true, and resources.gpu is 0; set cuda_graph=false, or resources.gpu=1"),
        (["engine.kind=stream", "activation_checkpoint=full"], "with engine.kind stream blocks pass through changing ones; set "),
        (["resources.num_workers=2"], "cuda_graph: true is for one worker, and resources.num_workers is 2"),
        (["optim.in_backward=true", "clip.mode=block", "batch.accumulation_steps=1"], "which optim.in_backward frees"),
        (["activation_checkpoint=offload"], "cannot hold the copies of activation_checkpoint offload"),
    ],
)
def test_what_a_cuda_graph_cannot_hold_is_refused(words, message):
    resolve(overrides=GRAPH)
    with pytest.raises(ConfigError, match=r"^cuda_graph: ") as refused:
        resolve(overrides=[*GRAPH, *words])
    assert message in str(refused.value)


@pytest.mark.parametrize(("words", "message"), NOT_YET.items())
def test_what_this_version_cannot_run_resolves_and_is_refused_at_start(words, message):
    with pytest.raises(ConfigError) as refused:
        check_available(resolve(overrides=words))
    assert str(refused.value) == message


@pytest.mark.parametrize("words", ["clip.mode=previous", "clip.mode=block", "optim.kind=adam8bit"])
def test_the_sharded_engine_has_every_way_to_clip_and_8_bit_moments(words):
    check_available(resolve(overrides=[words]))


@pytest.mark.parametrize("profile", ["cpu", "fsdp8", "a6000"])
@pytest.mark.parametrize("model", ["lm-tiny", "flux2-seed", "neox-20b"])
def test_the_profiles_can_be_run(profile, model):
    check_available(resolve(profile, model))


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16", "mixed-bf16"])
def test_the_stream_engine_has_every_precision(precision):
    words = ["engine.kind=stream", "activation_checkpoint=full", "engine.kept_blocks=2", f"precision={precision}"]
    check_available(resolve(overrides=words))
