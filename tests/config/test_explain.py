"""Each wrong input and the one line that it gets."""

import pytest

from fluxray.config.load import build, resolve
from fluxray.errors import ConfigError

UNKNOWN = {
    "optim.lrr=3": "optim.lrr: unknown key; did you mean optim.lr?",
    "optimizer.lr=3": "optimizer.lr: unknown key; did you mean optim.lr?",
    "lr=3": "lr: unknown key; did you mean optim.lr?",
    "learning_rate=3": "learning_rate: unknown key; did you mean optim.lr?",
    "optim.Weight-Decay=1": "optim.Weight-Decay: unknown key; did you mean optim.weight_decay?",
    "gradient_accumulation_steps=3": "gradient_accumulation_steps: unknown key; did you mean batch.accumulation_steps?",
    "train.steps=4": "train.steps: unknown key; did you mean train.num_steps?",
    "optim.lr.x=3": "optim.lr.x: unknown key; did you mean optim.lr?",
    "zzz=1": "zzz: unknown key; `fluxray config` prints all keys",
}

WRONG_TYPE = {
    "optim.lr=fast": "optim.lr: 'fast' is not a number above 0",
    "optim.lr=0": "optim.lr: 0 is not a number above 0",
    "optim.lr=true": "optim.lr: true is not a number above 0",
    "optim.lr=null": "optim.lr: null is not a number above 0",
    "optim.lr=.inf": "optim.lr: Infinity is not a number above 0",
    "optim.beta1=1": "optim.beta1: 1 is not a number of at least 0 and below 1",
    "batch.micro_size=2.5": "batch.micro_size: 2.5 is not a whole number of at least 1",
    "encode.resolution=large": "encode.resolution: 'large' is not a whole number or a list of them",
    "encode.bucket_step=40": "encode.bucket_step: 40 is not a whole number of at least 16 and in multiples of 16",
    "batch.micro_size=true": "batch.micro_size: true is not a whole number of at least 1",
    "data.vocab_size=big": "data.vocab_size: 'big' is not a whole number of at least 258 or null",
    "data.vocab_size=false": "data.vocab_size: false is not a whole number of at least 258 or null",
    "compile=maybe": "compile: 'maybe' is not true or false",
    "precision=fp16": "precision: 'fp16' is not one of fp32, amp-bf16, amp-fp16, mixed-bf16",
    "data.text_key=true": "data.text_key: true is not text",
    "data.source=[1, {a: 2}]": "data.source: [1, {\"a\": 2}] is not text or a list of texts",
    "name=a/b": "name: 'a/b' is not text of the form ^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$ or null",
    "model.config=5": "model.config: 5 is not a mapping",
    "resources.label_selector={a: [1]}": 'resources.label_selector: {"a": [1]} is not a mapping of names to texts',
    "task.kind=vae": "task.kind: 'vae' is not one of lm, flow",
    "task.mode_scale=2": "task.mode_scale: has no effect with task.kind lm; drop it or set task.kind=flow",
    "data.cache=[a]": 'data.cache: ["a"] is not text or null',
}  # fmt: skip

SECTION = {
    "optim=3": "optim: 3 is not a section; set a key of it, such as optim.lr",
    "evaluation=null": "evaluation: null is not a section; set a key of it, such as evaluation.every_steps",
    "engine=sharded": "engine: 'sharded' is not a section; set a key of it, such as engine.kind",
    "engine.kind=foo": "engine.kind: 'foo' is not one of sharded, stream",
    "engine.kind=[a]": 'engine.kind: ["a"] is not one of sharded, stream',
}

FORM = {
    "optim.lr": "optim.lr: is not of the form key=value, such as optim.lr=3e-4",
    "=5": "=5: is not of the form key=value, such as optim.lr=3e-4",
    "optim.lr=": "optim.lr: no value behind the =; write optim.lr=VALUE",
    "optim=": "optim: no value behind the =; write optim=VALUE",
    "model.config=/none/k.json": "model.config: /none/k.json: cannot be read (No such file or directory); name another file",
}


@pytest.mark.parametrize(("word", "message"), [*UNKNOWN.items(), *WRONG_TYPE.items(), *SECTION.items(), *FORM.items()])
def test_a_wrong_word_gets_one_line(word, message):
    with pytest.raises(ConfigError) as refused:
        resolve(overrides=[word])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("profile", "model", "message"),
    [
        ("gpu", None, "--profile: 'gpu' is unknown; there are a6000, cpu, fsdp8"),
        ("A6000", None, "--profile: 'A6000' is unknown; did you mean a6000?"),
        ("fsdp-8", None, "--profile: 'fsdp-8' is unknown; did you mean fsdp8?"),
        (None, "lmtiny", "--model: 'lmtiny' is unknown; did you mean lm-tiny?"),
    ],
)
def test_an_unknown_name_gets_one_line(profile, model, message):
    with pytest.raises(ConfigError) as refused:
        resolve(profile, model)
    assert str(refused.value) == message


def test_the_first_of_several_faults_is_named_and_the_others_are_counted():
    with pytest.raises(ConfigError, match=r"^optim\.lrr: unknown key; did you mean optim\.lr\? \(and 1 more\)$"):
        resolve(overrides=["optim.lrr=1", "seeds=1"])
    with pytest.raises(ConfigError, match=r"^optim\.lr: -1 is not a number above 0 \(and 1 more\)$"):
        resolve(overrides=["optim.eps=-2", "optim.lr=-1"])


def test_a_key_of_another_kind_of_section_is_not_ignored():
    with pytest.raises(ConfigError) as refused:
        resolve("a6000", None, ["engine.reshard_after_forward=false"])
    assert str(refused.value) == (
        "engine.reshard_after_forward: has no effect with engine.kind stream; drop it or set engine.kind=sharded"
    )


def test_a_long_value_is_cut():
    with pytest.raises(ConfigError) as refused:
        build({"optim": {"lr": "x" * 1000}})
    assert len(str(refused.value)) < 130


def test_keys_that_are_not_text_are_named():
    with pytest.raises(ConfigError, match=r"^5: unknown key"):
        build({5: 1})  # type: ignore[dict-item]
