from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fluxray.config.load import resolve
from fluxray.data.latent_shards import TextEmbedding
from fluxray.data.latents import FlowRow
from fluxray.errors import ConfigError
from fluxray.models.flux_facts import flux_facts
from fluxray.protocols import BatchKey, FlowBatch, SampleId
from fluxray.tasks.flow import FlowTask
from fluxray.tasks.flow_gate import FirstLossGate, distilled_warning, judge
from tests.models.flux_helpers import built
from tests.tasks.flow_helpers import SAMPLES, batch_of, facts_of, task_of

LAWS: dict[str, dict[str, Any]] = {
    "uniform": {"timesteps": "uniform"},
    "logit_normal": {},
    "mode": {"timesteps": "mode"},
    "shifted": {"shift": "resolution"},
    "cosmap": {"weighting": "cosmap"},
    "sigma_sqrt": {"weighting": "sigma_sqrt"},
}


class Gate:
    """A gate of one or two ranks, and what it has said."""

    def __init__(self, policy: Any = "warn", published: bool = False, others: Sequence[tuple[float, float, int]] = ()):
        self.said: list[str] = []
        self.judge = FirstLossGate(policy, published, lambda value: [value, *others], self.said.append)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["flux1-tiny", "flux2-tiny"])
def test_random_weights_pass_under_every_law(name: str, law: str) -> None:
    config = resolve("cpu", name)
    facts = flux_facts(config.model)
    random = torch.Generator().manual_seed(0)

    def row(number: int) -> FlowRow:
        pooled = None if facts.pooled_width is None else torch.randn(facts.pooled_width, generator=random)
        latents = 0.7 * torch.randn(16, facts.in_channels, generator=random)
        return FlowRow(latents, 4, 4, torch.randn(6, facts.text_width, generator=random), pooled, key=f"{number}")

    task = FlowTask(config.task.model_copy(update=LAWS[law]), facts, {6: TextEmbedding(torch.zeros(6, facts.text_width), None)})
    stack = built(config.model)
    batches = [task.prepare([row(i) for i in range(2)], BatchKey(0, 0, (SampleId(0, k), SampleId(0, k + 1)))) for k in (0, 2)]
    with torch.no_grad():
        outputs = [stack(batch, task.loss_fn) for batch in batches]
    loss = sum(output.sum.item() for output in outputs) / 4
    plain, gate, published = Gate("stop"), Gate(), Gate(published=True)
    plain.judge(batches, loss)
    gate.judge(batches, loss)
    published.judge(batches, loss)
    assert gate.said == [] and len(published.said) == 1
    assert law in ("cosmap", "sigma_sqrt") or 1.2 < loss < 2.2


@pytest.mark.parametrize(("share", "passes"), [(0.01, False), (0.15, True), (0.3, True), (0.6, True), (0.7, False), (1.0, False)])
def test_published_weights_leave_less_than_random_ones(share: float, passes: bool) -> None:
    assert (judge(share * 2.0, 2.0, 1.0, published=True) is None) == passes


@pytest.mark.parametrize(("share", "passes"), [(0.3, False), (0.7, False), (0.9, True), (1.4, True), (2.5, False)])
def test_random_weights_leave_all_of_the_target(share: float, passes: bool) -> None:
    assert (judge(share * 2.0, 2.0, 1.0, published=False) is None) == passes


def test_the_published_figures_are_plausible() -> None:
    assert judge(1.5, 1.5, 0.5, published=False) is None
    assert judge(0.4, 2.0, 1.0, published=True) is None


def loss_of_nothing(batches: list[FlowBatch], share: float = 1.0) -> float:
    total = sum(float(torch.dot(batch.weight, batch.target.square().flatten(1).mean(1))) for batch in batches)
    return share * total / sum(batch.num_valid for batch in batches)


@pytest.mark.parametrize("law", LAWS)
def test_chance_law_and_weighting_cancel(law: str) -> None:
    for samples in (SAMPLES, SAMPLES[:1]):
        batches = [batch_of(task_of(**LAWS[law]), samples)]
        for share, warned in ((1.0, 0), (0.5, 1), (2.2, 1)):
            gate = Gate()
            gate.judge(batches, loss_of_nothing(batches, share))
            assert len(gate.said) == warned


@pytest.mark.parametrize("power", [0.01, 7.7])
def test_latents_of_another_scale_are_the_first_cause(power: float) -> None:
    gate = Gate(published=True)
    batches = [batch_of(task_of(), power=power)]
    gate.judge(batches, loss_of_nothing(batches, 0.3))
    assert len(gate.said) == 1 and "mean square of the latents" in gate.said[0]
    assert "they are scaled or shifted otherwise" in gate.said[0] and "\n" not in gate.said[0]


def test_stop_ends_the_run_with_one_line() -> None:
    with pytest.raises(ConfigError) as refused:
        Gate("stop", published=True).judge([batch_of(task_of())], 1.5)
    assert str(refused.value).startswith("task.first_loss: the loss of step 1 is 1.5, 0.")
    assert "texts of another encoder or of other layers, a cache of another model, or weights that were not loaded" in str(
        refused.value
    )
    assert str(refused.value).endswith("; mend that, or set task.first_loss=warn")
    gate = Gate("warn", published=True)
    gate.judge([batch_of(task_of())], 1.5)
    assert gate.said[0].startswith("task.first_loss: the loss of step 1 is 1.5, 0.") and "\n" not in gate.said[0]


def test_all_ranks_judge_all_samples() -> None:
    batches = [batch_of(task_of(), SAMPLES[:2]), batch_of(task_of(), SAMPLES[2:4])]
    empty = replace(batches[0], weight=torch.zeros(2), num_valid=0)
    others = (300.0, 30.0, 30)  # another rank's targets have a power of 10
    share = (300.0 + loss_of_nothing(batches) * 4) / 34
    for own in (batches, [*batches, empty]):
        gate = Gate(others=[others])
        gate.judge(own, share)
        assert gate.said == []
        gate.judge(own, 0.5 * share)
        assert len(gate.said) == 1


def test_training_a_distilled_model_is_warned_of() -> None:
    assert distilled_warning(facts_of("flux2", guided=False, distilled=True), "path:klein") == (
        "model.weights: path:klein is distilled to sample in few steps, which training by flow matching undoes; train its base "
        "model (FLUX.2-klein-base-4B, or -base-9B) instead"
    )
    assert "train FLUX.1-dev instead" in str(distilled_warning(facts_of(distilled=True), "path:schnell"))
    for distilled, weights in ((False, "path:a"), (None, "path:a"), (True, None)):
        assert distilled_warning(facts_of(distilled=distilled), weights) is None
