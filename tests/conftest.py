"""Fixtures that many tests share: the models, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported, whatever the environment says: the models here are far too small to gain from threads, and
# tests that compare logprobs to the last bit need one way of summing.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What is rendered must not depend on the terminal or on how long a temporary path is; tests of a width name their own.
os.environ["COLUMNS"] = "400"
os.environ.pop("LINES", None)
# Before triton is imported, by whichever library comes first: without a GPU its kernels run in the interpreter.
if not (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def table_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models.table_model`: beam scores that can be worked out on paper."""
    from models import table_model

    path = tmp_path_factory.mktemp("table_model")
    table_model(path)
    return path


@pytest.fixture(scope="session")
def rand_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models.rand_model`: output that depends on the whole context."""
    from models import rand_model

    path = tmp_path_factory.mktemp("rand_model")
    rand_model(path)
    return path


SHARED = Path(os.environ.get("PAGEDBATCH_SHARED", REPOSITORY.parent / "shared"))


@pytest.fixture(scope="session")
def stories_path() -> Path:
    """stories260K, a trained Llama of 260 k parameters; not part of the repository."""
    path = SHARED / "models" / "stories260K-hf"
    if not path.is_dir():
        pytest.skip(f"no stories260K model at {path}; PAGEDBATCH_SHARED names the folder that holds models/")
    return path


@pytest.fixture(scope="session")
def genrec_path() -> Path:
    """Semantic ids of two product catalogs (MiniOneRec, Apache-2.0); not part of the repository."""
    path = SHARED / "data" / "genrec"
    if not path.is_dir():
        pytest.skip(f"no semantic ids at {path}; PAGEDBATCH_SHARED names the folder that holds data/")
    return path
