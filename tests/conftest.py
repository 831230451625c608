"""Fixtures that many tests share, the marker `host`, and random order.

pytest -m host          the host half: no torch, seconds
pytest --shuffle 7      modules, and the tests of each, in an order that the number 7 stands for
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

import environment
import pytest
from examples import load_profile
from host_modules import DEVICE_LIBRARIES, HOST

if TYPE_CHECKING:
    from workplace import Workplace

load_profile()

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _handlers_of_one_test() -> Iterator[None]:
    """A command that is run in a test shows what is logged; later tests find the loggers as they were."""
    loggers = [logging.getLogger(name) for name in ("pagedbatch", "pagedbatch_kernels")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


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


@pytest.fixture
def letters(tmp_path: Path, table_model_path: Path) -> Workplace:
    """A folder for runs of the table model."""
    from workplace import Workplace

    return Workplace(tmp_path, table_model_path)


@pytest.fixture
def words(tmp_path: Path, rand_model_path: Path) -> Workplace:
    """A folder for runs of the random model."""
    from workplace import Workplace

    return Workplace(tmp_path, rand_model_path)


SHARED = Path(os.environ.get("PAGEDBATCH_SHARED", REPOSITORY.parent / "shared"))


@pytest.fixture(scope="session")
def stories_path() -> Path:
    """stories260K, a trained Llama of 260 k parameters; not part of the repository."""
    path = SHARED / "models" / "stories260K-hf"
    if not path.is_dir():
        pytest.skip(f"no stories260K model at {path}; PAGEDBATCH_SHARED names the folder that holds models/")
    return path


@pytest.fixture(scope="session")
def aren_path() -> Path:
    """A trained encoder-decoder that writes Arabic names in Latin letters; not part of the repository."""
    path = SHARED / "models" / "aren-transliteration-hf"
    if not path.is_dir():
        pytest.skip(f"no transliteration model at {path}; PAGEDBATCH_SHARED names the folder that holds models/")
    return path


@pytest.fixture(scope="session")
def genrec_path() -> Path:
    """Semantic ids of two product catalogs (MiniOneRec, Apache-2.0); not part of the repository."""
    path = SHARED / "data" / "genrec"
    if not path.is_dir():
        pytest.skip(f"no semantic ids at {path}; PAGEDBATCH_SHARED names the folder that holds data/")
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run modules, and the tests of each, in random order")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before a test module is imported; pytest itself keeps the width of its terminal."""
    if session.config.pluginmanager.hasplugin("terminalreporter"):
        writer = session.config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth
    environment.clean()
    # Without a handler, Python prints warnings to stderr: the command line has its own, which tests of a job have not.
    logging.getLogger("pagedbatch").addHandler(logging.NullHandler())


def pytest_configure(config: pytest.Config) -> None:
    if _is_host_alone(config):
        sys.meta_path.insert(0, _NoDeviceLibraries())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m host` other modules are not even imported: they take seconds to."""
    is_other = collection_path.name.startswith("test_") and collection_path.stem not in HOST
    return True if is_other and _is_host_alone(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in HOST:
            item.add_marker("host")
    seed = config.getoption("shuffle")
    if seed is not None:
        draw = random.Random(seed)
        modules = {path: draw.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: (modules[item.path], draw.random()))


def _is_host_alone(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "host"


class _NoDeviceLibraries:
    """Proves that the host half needs none: whatever imports one fails."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in DEVICE_LIBRARIES:
            raise ModuleNotFoundError(f"a test marked `host` imports {name}", name=name)
        return None
