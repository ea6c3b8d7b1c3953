import pytest

from fluxray.config.load import from_yaml, resolve, to_yaml
from fluxray.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("45GB", 45 * 10**9),
        ("44GiB", 44 * 2**30),
        ("1.5TB", 15 * 10**11),
        ("512MiB", 2**29),
        ("4.5e10", 45 * 10**9),
        ("100", 100),
    ],
)
def test_sizes_are_read_as_bytes(text, count):
    assert resolve(overrides=[f"hardware.device_memory={text}"]).hardware.device_memory == count


def test_rates_are_bytes_a_second():
    assert resolve(overrides=["hardware.link=25GB/s"]).hardware.link == 25 * 10**9


@pytest.mark.parametrize(
    ("word", "message"),
    {
        "hardware.link=25GB": "hardware.link: '25GB' is not a rate above 0, such as 25GB/s, or null",
        "hardware.disk=big": "hardware.disk: 'big' is not a size above 0, such as 45GB or 44GiB, or null",
        "hardware.host_memory=0GB": "hardware.host_memory: '0GB' is not a size above 0, such as 45GB or 44GiB, or null",
        "hardware.device_memory=48Gb": "hardware.device_memory: '48Gb' is not a size above 0, such as 45GB or 44GiB, or null",
        "hardware.device_memory=true": "hardware.device_memory: true is not a size above 0, such as 45GB or 44GiB, or null",
        "hardware.device_memory=[1]": "hardware.device_memory: [1] is not a size above 0, such as 45GB or 44GiB, or null",
        "engine.weight_slots=2": "engine.weight_slots: has no effect with engine.kind sharded; drop it or set engine.kind=stream",
    }.items(),
)
def test_others_are_refused_in_one_line(word, message):
    with pytest.raises(ConfigError) as refused:
        resolve(overrides=[word])
    assert str(refused.value) == message


def test_yaml_gives_them_back(tmp_path):
    config = resolve("a6000", "neox-20b")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == config
