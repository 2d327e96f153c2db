"""Checks of what users give to clusters, runs and handles, made by the call that takes it.

A wrong value is reported where the user wrote it, not by a worker later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from timelyml.errors import ConfigError


def refusal(option: str, value: object, rule: str) -> ConfigError:
    """Return the error of an option whose value is not as the rule says."""
    return ConfigError(
        f"option {option!r} cannot work; got {value!r}; expected {rule}; correct it, or "
        "leave it out",
        option=option,
        value=value if isinstance(value, (int, float, str)) else repr(value),
    )


def check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is none of `choices`.

    Raises:
        ConfigError: It is none of them.
    """
    if value not in choices:
        raise refusal(option, value, f"one of {choices}")


def check_count(option: str, value: object) -> None:
    """Refuse what is no integer of at least 1.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refusal(option, value, "an integer of at least 1")


def check_seconds(option: str, value: object, *, may_be_zero: bool = False) -> None:
    """Refuse what is no time to wait: a number above 0, or 0 for what may only look.

    Raises:
        ConfigError: It is something else.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (value > 0 or (may_be_zero and value == 0)):  # type: ignore[operator]  # a number
        return
    least = "0 or more" if may_be_zero else "above 0"
    raise refusal(option, value, f"a number of seconds, {least}")


def check_wait(timeout_s: object) -> None:
    """Refuse what is neither None nor a time to wait, 0 included.

    Raises:
        ConfigError: It is something else.
    """
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s, may_be_zero=True)


def check_environment(value: object) -> None:
    """Refuse what cannot be environment variables.

    Raises:
        ConfigError: It is no mapping of names to text, or has one that no process takes.
    """
    if not isinstance(value, Mapping):
        raise refusal("environment", value, "a mapping of names to text")
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise refusal("environment", name, "names that are text without '='")
        if not isinstance(text, str) or "\0" in text:
            raise refusal(f"environment[{name!r}]", text, "text")


def check_listener(value: object) -> None:
    """Refuse what can be no `on_message`.

    Raises:
        ConfigError: It is neither None nor callable.
    """
    if value is not None and not callable(value):
        rule = "a function of (operator, shard, tag, body)"
        raise refusal("on_message", value, rule)


def check_known(who: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse options that `who` does not have.

    Raises:
        ConfigError: One of them has no such name.
    """
    names = list(known)
    for option in options:
        if option not in names:
            raise ConfigError(
                f"{who} has no option of that name; got {option!r}; expected one of "
                f"{names}; correct it",
                option=option,
            )
