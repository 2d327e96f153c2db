"""Checks of arguments, made by the call that takes them.

A wrong argument is reported where the user wrote it, not by a worker later.
"""

from __future__ import annotations

from typing import Any

from timelyml.errors import ConfigError, GraphError
from timelyml.runtime.operator import broken_rule


def check_callable(
    operator: str,
    argument: str,
    value: Any,
    *,
    may_await: bool = False,
    may_yield: bool = False,
) -> None:
    """Refuse `value` unless it can be called, and calling it is all that it takes.

    Raises:
        GraphError: It cannot be called, or calling it gives a coroutine or generator.
    """
    rule = broken_rule(value, may_await=may_await, may_yield=may_yield)
    if rule is not None:
        raise GraphError(
            f"operator {operator!r} needs a function for {argument!r}; got {value!r}; "
            f"{rule}",
            operator=operator,
            argument=argument,
        )


def check_optional_callable(
    operator: str, argument: str, value: Any, *, may_yield: bool = False
) -> None:
    """Refuse `value` unless it is None or `check_callable` takes it.

    Raises:
        GraphError: It is something else.
    """
    if value is not None:
        check_callable(operator, argument, value, may_yield=may_yield)


def check_count(operator: str, argument: str, value: Any, *, least: int = 1) -> None:
    """Refuse `value` unless it is an integer of at least `least`.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"operator {operator!r} has option {argument!r} out of range; got "
            f"{value!r}; expected an integer of at least {least}; correct the option",
            operator=operator,
            option=argument,
        )


def check_optional_count(
    operator: str, argument: str, value: Any, *, least: int = 1
) -> None:
    """Refuse `value` unless it is None or an integer of at least `least`.

    Raises:
        ConfigError: It is something else.
    """
    if value is not None:
        check_count(operator, argument, value, least=least)
