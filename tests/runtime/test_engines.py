import pytest
import torch

from fluxray.config.load import resolve
from fluxray.errors import ConfigError
from fluxray.models.causal_lm import build_causal_lm
from fluxray.runtime.engines import build_engine
from fluxray.tasks.lm import LmTask


def test_a_graph_of_a_model_with_dropout_is_refused_and_named():
    config = resolve("cpu", "lm-tiny", ["resources.gpu=1", "cuda_graph=true", "model.config.hidden_dropout=0.1"])
    stack = build_causal_lm(config.model, config.seed)
    with pytest.raises(ConfigError, match=r"^cuda_graph: true, but the model has dropout, .* or cuda_graph=false$"):
        build_engine(config, stack, LmTask(0).loss_fn, torch.device("cpu"), 1, None, print)
