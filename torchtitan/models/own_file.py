"""Imports the file or module of a user's model, and says where it fails."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.refusal import NotThereError, Refusal, blaming, place_of


def load(place: str, name: str) -> Any:
    """The module that `model.name` means: a file, or a module that Python finds."""
    return _load_file(Path(place), name) if place.endswith(".py") else _import(place, name)


def _load_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise NotThereError(f'model.name = "{name}": there is no file {path.absolute()}', "correct the path")
    folder, module_name = path.resolve().parent, f"torchtitan_model_{path.stem}_{abs(hash(str(path.resolve())))}"
    if (folder / "__init__.py").is_file():  # a module of a package, which may import others of it by a dot
        parts = [path.stem]
        while (folder / "__init__.py").is_file():
            parts, folder = [folder.name, *parts], folder.parent
        with _first_on_path(folder):
            module = _import(".".join(parts), name)
        if Path(module.__file__).resolve() != path.resolve():
            raise Refusal(
                f'model.name = "{name}": Python has another package {parts[0]}, in {module.__file__}; rename yours'
            )
        return module
    described = importlib.util.spec_from_file_location(module_name, path)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[module_name] = module  # dataclasses and pickle look up their module here
    with _first_on_path(folder), blaming(f'model.name = "{name}": the file'):
        described.loader.exec_module(module)
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """While a user's file is imported, it finds its siblings first; later they are found last."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.path.append(str(folder))


def _import(place: str, name: str) -> Any:
    if place.startswith("."):
        raise Refusal(f'model.name = "{name}" begins with a dot; name the file, as path/to/file.py:SPEC')
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):  # it imports something that is missing
            raise Refusal(f'model.name = "{name}": the module fails{place_of(error)}: {error}') from None
        fix = "correct the name, or set PYTHONPATH"
        raise NotThereError(f'model.name = "{name}": Python finds no module {place}', fix) from None
