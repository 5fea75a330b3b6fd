"""Starts a build worker, with nothing on the import path that the drawing process did not name.

Run as a script: ``python start_worker.py PACKAGE FOLDERS [background]``.

PACKAGE is the folder of ``onediff_ext`` that the parent runs. It is imported from exactly there,
and its parent folder does not join the path: a source checkout or ``site-packages`` holds modules
whose names could hide others. FOLDERS, joined as in ``$PATH``, come last on the path: there the
parent found torch. ``python -m`` would put the current folder first, and Python 3.10 has no
option against that.
"""

import sys

if __name__ == "__main__":
    # Before anything else is imported: a script's own folder comes first on the path, unless -P
    # or -I say otherwise. Relative entries, the empty one among them, mean the current folder.
    _own = __file__.rpartition("start_worker")[0].rstrip("/\\")
    sys.path[:] = [entry for entry in sys.path if entry and entry.rstrip("/\\") != _own]

import importlib.util
import os


def import_package(package: str, folders: str) -> None:
    """Make the parent's package importable, and nothing else that lies beside it.

    Args:
        package: Its folder.
        folders: Where else to look for modules, after all other places.
    """
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    more = [folder for folder in folders.split(os.pathsep) if os.path.isabs(folder)]
    sys.path[:] = path + [folder for folder in more if folder not in path]
    spec = importlib.util.spec_from_file_location(
        "onediff_ext",
        os.path.join(package, "__init__.py"),
        submodule_search_locations=[package],
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["onediff_ext"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    import_package(*sys.argv[1:3])
    from onediff_ext.building.worker import program

    sys.exit(program.main(sys.argv[3:]))
