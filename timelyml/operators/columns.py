"""The columns of a payload, by name."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from timelyml.errors import PayloadError

Columns: TypeAlias = dict[str, npt.NDArray[Any]]


def columns_of(payload: Any) -> Columns:
    """Return the columns of a payload by name; a bare array's name is "".

    Raises:
        PayloadError: The payload is a list of records, or its columns are nested.
    """
    if isinstance(payload, np.ndarray):
        return {"": payload}
    if isinstance(payload, dict):
        columns = payload
    elif isinstance(payload, tuple):
        names = getattr(payload, "_fields", None) or map(str, range(len(payload)))
        columns = dict(zip(names, payload, strict=True))
    elif hasattr(payload, "__dataclass_fields__"):
        fields = payload.__dataclass_fields__
        columns = {name: getattr(payload, name) for name in fields}
    else:
        columns = {}
    if not columns or not all(isinstance(c, np.ndarray) for c in columns.values()):
        raise PayloadError(
            f"a payload has no columns by name; got {type(payload).__name__}; expected "
            f"a flat dict, tuple or dataclass of arrays; send columns instead",
            got=type(payload).__name__,
        )
    return columns


def column(operator: str, columns: Columns, name: str) -> npt.NDArray[Any]:
    """Return one of the columns.

    Raises:
        PayloadError: There is none of that name.
    """
    found = columns.get(name)
    if found is None:
        raise PayloadError(
            f"operator {operator!r} needs a column that the payload lacks; got columns "
            f"{list(columns)}; expected {name!r} among them; correct the name",
            operator=operator,
            column=name,
        )
    return found
