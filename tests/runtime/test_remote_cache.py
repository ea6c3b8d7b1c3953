"""A cache behind a web server, from configuration to training."""

from pathlib import Path

import pytest

from fluxray.config.load import resolve
from fluxray.errors import ConfigError
from fluxray.runtime import encode
from fluxray.runtime.cluster import worker_environment
from fluxray.runtime.prepare import absolute_paths
from tests.flow_caches import random_cache
from tests.runtime.test_flow_options import TINY
from tests.runtime.test_worker_lora import LORA, flow, loss_of, trained
from tests.stores import web_on

pytestmark = pytest.mark.usefixtures("one_thread")


def test_training_is_the_same_as_from_a_folder(tmp_path: Path) -> None:
    random_cache(tmp_path / "cache", {(32, 32, 5): 8})
    local = trained(flow(tmp_path / "cache"), tmp_path / "local", tmp_path)
    with web_on(tmp_path) as web:
        config = resolve("cpu", "flux1-tiny", [f"data.cache={web.address}/cache", *TINY, *LORA])
        assert absolute_paths(config).data.cache == f"{web.address}/cache"
        remote = trained(config, tmp_path / "remote", tmp_path)
        assert any(one is not None for _, one in web.asked)
    assert loss_of(remote) == loss_of(local) and len(loss_of(local)) > 1


def test_encoding_into_a_store_is_refused() -> None:
    config = resolve("cpu", "flux1-tiny", ["data.source=tars:s3://bucket/a.tar", "data.cache=s3://bucket/cache"])
    with pytest.raises(ConfigError) as refused:
        encode.prepare(config)
    assert str(refused.value) == (
        "data.cache: 's3://bucket/cache', but pictures are encoded into a folder; name one, and copy it there when it is done"
    )


@pytest.mark.parametrize("words", [["data.cache=s3://bucket/cache"], ["data.source=tars:s3://bucket/a.tar"]])
def test_workers_are_told_where_the_store_is(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    config = resolve("cpu", "flux1-tiny", words)
    assert worker_environment(config, None)["AWS_ENDPOINT_URL"] == "http://store:9000"
    assert "AWS_ENDPOINT_URL" not in worker_environment(resolve("cpu", "flux1-tiny", []), None)
