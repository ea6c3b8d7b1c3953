"""Pictures by an engine are those of diffusers' own pipelines with the weights that are exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fluxray.config.sampling import EmaConfig
from fluxray.data.prompts import PromptSet, chosen, read_prompts, write_prompts
from fluxray.engine.stream_store import StreamSettings
from fluxray.errors import ConfigError, DataError
from fluxray.models.flux_stack import FluxStack
from fluxray.protocols import Engine, FlowBatch, LossOutput
from fluxray.tasks.flow import squared_error
from fluxray.tasks.grid import draw_grid, file_name, save_png
from fluxray.tasks.sampling import EngineTransformer, OtherRankError, SamplingError, Studio, agreed
from tests.engine.helpers import EngineCase
from tests.engine.stream_helpers import CPU, sharded_of, stream_of
from tests.flow_pictures import tiny_encoders
from tests.models.flux_helpers import draw_for
from tests.sampling_helpers import CAPTIONS, RECIPE, Scene, scene

pytestmark = pytest.mark.usefixtures("one_thread")
ENGINES: dict[str, Callable[..., Any]] = {
    "sharded": sharded_of,
    "stream": lambda stack, loss_fn, case: stream_of(stack, loss_fn, case, StreamSettings(2, 2)),
}
CASE_NAMES = ("flux1 dev", "flux1 schnell", "flux2 dev", "flux2 klein")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    folder = tmp_path_factory.mktemp("pipelines")
    encoders = {family: tiny_encoders(family, folder / family) for family in ("flux1", "flux2")}
    return {case: scene(case, encoders[case.partition(" ")[0]]) for case in CASE_NAMES}


def engine_of(found: Scene, name: str, ema: EmaConfig | None = None) -> tuple[FluxStack, Engine]:
    stack = found.stack()
    case = EngineCase(found.model, ema=ema or EmaConfig())
    return stack, ENGINES[name](stack, squared_loss, case)


def exported(found: Scene, engine: Engine, section: str = "weights") -> Any:
    """Return the library's model with an engine's weights."""
    engine.flush()
    stack = found.stack()
    stack.model.to_empty(device="cpu")
    weights = {item.name: item.tensor.detach().clone() for item in engine.state_items() if item.section == section}
    stack.model.load_state_dict(weights)
    return stack.model.eval()


def squared_loss(output: torch.Tensor, batch: FlowBatch) -> LossOutput:
    return LossOutput(squared_error(output, batch.target, batch.weight), batch.num_valid)


def studio_of(found: Scene, engine: Engine, rows: int = 8, agree: Any = lambda failed: failed) -> Studio:
    return Studio(found.folder, EngineTransformer(found.keys, engine.forwards, rows, agree), False, CPU)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", CASE_NAMES)
def test_pictures_are_those_of_diffusers_bit_for_bit(scenes: dict[str, Scene], case: str, name: str) -> None:
    found = scenes[case]
    _, engine = engine_of(found, name)
    model = exported(found, engine)
    one = found._replace(prompts=PromptSet(found.prompts.prompts[:1], found.prompts.empty))  # the batches are the same, too
    actual = studio_of(found, engine).sample(one.prompts, RECIPE)
    expected = one.expected(model)
    assert len(actual) == 1 and len(actual[0]) == len(expected) == 2
    for picture, reference in zip(actual[0], expected, strict=True):
        assert picture.size == (RECIPE.width, RECIPE.height) and np.array_equal(np.array(picture), np.array(reference))
    assert not np.array_equal(np.array(actual[0][0]), np.array(actual[0][1]))


@pytest.mark.parametrize("case", ["flux1 dev", "flux2 klein"])
def test_all_pictures_of_a_step_go_through_a_block_while_it_is_there(scenes: dict[str, Scene], case: str) -> None:
    found = scenes[case]
    stack, engine = engine_of(found, "stream")
    expected = found.expected(exported(found, engine))
    calls: list[int] = []
    stack.blocks[0].module.register_forward_pre_hook(lambda *_: calls.append(0))
    fetched = counted_fetches(engine)
    actual = studio_of(found, engine, rows=3).sample(found.prompts, RECIPE)
    passes = RECIPE.steps * (2 if case == "flux2 klein" else 1)
    assert len(calls) == 2 * passes and max(fetched.values()) <= passes  # four pictures in parts of three
    pictures = [picture for row in actual for picture in row]
    for picture, reference in zip(pictures, expected, strict=True):
        difference = np.abs(np.array(picture, dtype=int) - np.array(reference, dtype=int)).max()
        assert difference <= 1


@pytest.mark.parametrize("name", ENGINES)
def test_pictures_of_averages(scenes: dict[str, Scene], name: str) -> None:
    found = scenes["flux2 klein"]
    _, engine = engine_of(found, name, EmaConfig(decay=0.99))
    train(found, engine)
    one = found._replace(prompts=PromptSet(found.prompts.prompts[:1], found.prompts.empty))
    expected = one.expected(exported(found, engine, "ema"))
    with engine.averaged():
        actual = studio_of(found, engine).sample(one.prompts, RECIPE)
    trained = studio_of(found, engine).sample(one.prompts, RECIPE)
    assert np.array_equal(np.array(actual[0][0]), np.array(expected[0]))
    assert not np.array_equal(np.array(trained[0][0]), np.array(expected[0]))


def test_guidance_changes_the_picture(scenes: dict[str, Scene]) -> None:
    for case in ("flux1 dev", "flux2 dev", "flux2 klein"):
        found = scenes[case]
        studio = studio_of(found, engine_of(found, "sharded")[1])
        one, other = (studio.sample(found.prompts, RECIPE.__class__((3,), 2, 32, 32, g))[0][0] for g in (1.0, 5.0))
        assert not np.array_equal(np.array(one), np.array(other))


def test_latents_that_are_not_finite_give_no_picture(scenes: dict[str, Scene]) -> None:
    found = scenes["flux1 dev"]

    def forwards(batches: Any) -> list[torch.Tensor]:
        return [batch.noised * torch.nan for batch in batches]

    studio = Studio(found.folder, EngineTransformer(found.keys, forwards, 8), None, CPU)
    with pytest.raises(SamplingError, match="the latents are not finite"):
        studio.sample(found.prompts, RECIPE)


def test_ranks_agree_as_often_as_each_other() -> None:
    """Every way in which two ranks can fail, at any of their agreements, one of them or both."""
    for failing in ([None, None], [0, None], [2, None], [3, None], [None, 1], [1, 1], [0, 2]):
        outcomes = run_two(failing)
        assert {len(asked) for asked, _ in outcomes} == {min([step + 1 for step in failing if step is not None] or [4])}
        kinds = [kind for _, kind in outcomes]
        assert kinds == ["made", "made"] if failing == [None, None] else "made" not in kinds


def test_prompts_go_through_a_file(scenes: dict[str, Scene], tmp_path: Path) -> None:
    for case, pooled in (("flux1 dev", 32), ("flux2 klein", None)):
        found = scenes[case]
        path = tmp_path / f"{case}.safetensors"
        write_prompts(path, found.prompts)
        width = found.keys["joint_attention_dim"]
        read = read_prompts(path, width, pooled)
        assert [prompt.caption for prompt in read.prompts] == list(CAPTIONS)
        assert torch.equal(read.prompts[1].embedding.text, found.prompts.prompts[1].embedding.text)
        assert torch.equal(read.empty[32].text, found.empty.text)
        assert [prompt.caption for prompt in chosen(read, CAPTIONS[1:]).prompts] == [CAPTIONS[1]]
        with pytest.raises(ConfigError, match=r"sample.prompts: 'a dog' is no caption whose embedding is there; make a file"):
            chosen(read, ["a dog"])
        with pytest.raises(ConfigError, match=r"sample.embeddings: .* is of other text encoders than the model's"):
            read_prompts(path, width + 1, pooled)
    (tmp_path / "broken").write_text("x")
    with pytest.raises(DataError, match=r"sample.embeddings: .* is no file of prompts"):
        read_prompts(tmp_path / "broken", 3, None)


def test_a_grid_is_labelled_and_files_say_what_they_are(scenes: dict[str, Scene], tmp_path: Path) -> None:
    from PIL import Image

    colours = [[Image.new("RGB", (64, 48), (row, 9 * column, 200)) for column in range(3)] for row in range(2)]
    grid = draw_grid(colours, ["a very long caption " * 30, ""], [1, 2, 3], "step 20")
    assert grid.width == 4 * 8 + 3 * 160 and grid.height > 2 * 120
    assert {(1, 18, 200), (0, 0, 200)} <= {colour for _, colour in grid.getcolors(1 << 20)}
    save_png(colours[0][1], tmp_path / "deep" / "one.png", {"prompt": "ein Röslein", "seed": 3})
    opened: Any = Image.open(tmp_path / "deep" / "one.png")
    assert opened.text == {"prompt": "ein Röslein", "seed": "3"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.png"]
    assert file_name(2, "A red/bicycle, under  a bridge!", 7) == "002-a-red-bicycle-under-a-bridge-seed7.png"
    assert file_name(0, "紅", 7) == "000-seed7.png"


def train(found: Scene, engine: Engine) -> None:
    """Take two steps."""
    for step in range(2):
        batch: FlowBatch = draw_for(found.model, step=step)
        engine.train_step([batch], 1e-2)


def counted_fetches(engine: Any) -> dict[int, int]:
    """Count the copies to the device of each block's weights from now on."""
    ring, counts = engine._store.weights, {}
    fetch = ring.transfers.fetch

    def counting(device: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        counts[host.data_ptr()] = counts.get(host.data_ptr(), 0) + 1
        return fetch(device, host, after)

    ring.transfers.fetch = counting
    return counts


def run_two(failing: list[int | None]) -> list[tuple[list[bool], str]]:
    """Let two ranks call a transformer three times and then end; each fails before its agreement of that number."""
    from threading import Barrier, Thread

    barrier, brought = Barrier(2, timeout=10), [False, False]
    found: list[tuple[list[bool], str]] = [([], "")] * 2

    def rank(number: int) -> None:
        asked: list[bool] = []

        def agree(failed: bool) -> bool:
            asked.append(failed)
            brought[number] = failed
            barrier.wait()
            together = any(brought)
            barrier.wait()
            return together

        def action() -> None:
            for step in range(4):
                if failing[number] == step:
                    raise ValueError
                if step < 3 and agree(False):
                    raise OtherRankError

        kind = "made"
        try:
            agreed(action, agree)
        except OtherRankError:
            kind = "other"
        except ValueError:
            kind = "own"
        found[number] = (asked, kind)

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
