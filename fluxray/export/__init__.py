"""From a checkpoint to folders and files that transformers, diffusers and ComfyUI load."""

from fluxray.export.run import MODEL_DIR, TOKENIZER_DIR, export_run

__all__ = ["MODEL_DIR", "TOKENIZER_DIR", "export_run"]
