"""Adds modules to archives that a Python on another host runs or imports from."""

from __future__ import annotations

import importlib.util
import marshal
import zipfile

__all__ = ["FIXED_TIME", "add_module"]

FIXED_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time a zip file can hold. With a fixed time, the same sources and Python give the same bytes."""

_FILE_MODE = 0o644
_UNCHECKED_HASH = 0b01
"""PEP 552: the compiled module is valid for the source beside it, whatever their timestamps."""
_MARSHAL_VERSION = 2
"""The last version without object references, which depend on what else this process holds."""


def add_module(archive: zipfile.ZipFile, path: str, source: bytes) -> None:
    """Add a module's source and, beside it, the code that this Python compiles it to.

    Python does not cache compiled modules of an archive, so that every start of the node there would spend half a
    second compiling. Another Python version does not know the magic number and uses the source (`zipimport`). Raises
    SyntaxError.
    """
    code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + importlib.util.source_hash(source)
    for name, content in ((path, source), (f"{path}c", head + marshal.dumps(code, _MARSHAL_VERSION))):
        info = zipfile.ZipInfo(name, FIXED_TIME)
        info.external_attr = _FILE_MODE << 16
        info.create_system = 3  # Unix, even if made on another system
        info.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(info, content)
