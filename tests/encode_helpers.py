"""Pipelines of tiny encoders as `encode` takes them: beside the encoders the configuration of a transformer that reads them."""

import json
from pathlib import Path

from fluxray.config.load import resolve
from fluxray.data.latent_facts import Family
from tests.flow_pictures import Encoders, tiny_encoders


def tiny_pipeline(family: Family, folder: Path, text_tokens: int = 32) -> Encoders:
    """Make tiny encoders and save them with the transformer's config.json of the family's tiny preset."""
    encoders = tiny_encoders(family, folder, text_tokens)
    config = resolve("cpu", f"{family}-tiny").model.config
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["diffusers", config["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index))
    return encoders
