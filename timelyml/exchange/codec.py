"""Messages to bytes and back: msgpack, with arrays beside it.

The body is msgpack; arrays of 8 KiB and more leave as buffers of their own, which
nobody copies, and arrive as read-only views of what was received. What msgpack
cannot tell apart is a list whose first item is a mark, an empty extension value
that no user value can be: tuples, arrays, sets... Objects beyond that are pickled,
and unpickled only if the codec was told that its peers are authenticated.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgpack
import numpy as np

from timelyml.errors import (
    PayloadError,
    UnreadableError,
    WireError,
    summary_of,
)
from timelyml.exchange.arrays import array_from_bytes, dtype_token, raw_bytes
from timelyml.exchange.garbled import garbled
from timelyml.exchange.schema import Schema, build_schemas
from timelyml.exchange.unread import Unread
from timelyml.exchange.values import (
    NATIVE,
    PLAIN,
    as_array,
    columns_of,
    decode_plain,
    encode_plain,
)

OUT_OF_BAND_BYTES = 8192
_MANY = 8  # records in a list that is worth a look

Buffer: TypeAlias = Any
"""Anything that offers the buffer protocol: bytes, memoryview, a frame's view."""
Dumps: TypeAlias = Callable[[Any, Callable[[pickle.PickleBuffer], bool]], bytes]


class _Mark:
    """First item of a list that stands for something else, once it is decoded."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


_TUPLE, _ROWS, _SPREAD, _ARRAY, _SCALAR, _PLAIN, _MESSAGE, _PICKLE = range(8)
_EXT = [msgpack.ExtType(code, b"") for code in range(8)]
_MARKS = [_Mark(code) for code in range(8)]
_FLAG = object()


class Codec:
    """Encodes and decodes messages of given classes; owned by one thread.

    Args:
        message_types: Dataclasses or named tuples that `encode` takes at the top;
            the same, in the same order, on both sides. Classes nested in them are
            found by their annotations.
        allow_pickle: Whether `decode` may run pickle, since every frame that reaches
            it comes from an authenticated peer.
        dumps: Pickles an object, offering large buffers to a callback as
            `pickle.dumps(..., buffer_callback=)` does; for objects by value.

    >>> codec = Codec([])
    >>> body, buffers = codec.encode([(1, "a"), {"x": {2, 3}}])
    >>> codec.decode(body, buffers)
    [(1, 'a'), {'x': {2, 3}}]
    """

    def __init__(
        self,
        message_types: Sequence[type[Any]],
        *,
        allow_pickle: bool = False,
        dumps: Dumps | None = None,
    ) -> None:
        self.allow_pickle = allow_pickle
        self._dumps = dumps or _dumps
        self._schemas = build_schemas(message_types, self._encode_any)
        self._by_index = list(self._schemas.values())
        self._buffers: list[Buffer] = []  # of the message in work
        self._open_marks = 0
        self._has_marks = 0
        self._num_pickles = 0  # begun, of the message that is decoded
        self._failed_pickle = 0  # the number of the one that does not unpickle
        self._encoders: dict[type[Any], Callable[[Any], Any]] = {
            tuple: _encode_tuple,
            np.ndarray: self._encode_array,
        }
        for cls, schema in self._schemas.items():
            self._encoders[cls] = _message_encoder(schema)
        self._decoders = [
            _decode_tuple,
            _decode_rows,
            _decode_spread,
            self._decode_array,
            _decode_scalar,
            decode_plain,
            self._decode_message,
            self._decode_pickle,
        ]
        self._packer = msgpack.Packer(
            default=self._encode_other,
            strict_types=True,
            unicode_errors="surrogatepass",
        )
        unpack = partial(
            msgpack.unpackb, strict_map_key=False, unicode_errors="surrogatepass"
        )
        self._unpack_plain = partial(unpack, ext_hook=_refuse_ext)
        self._unpack_marked = partial(
            unpack, list_hook=self._on_list, ext_hook=self._on_ext
        )
        self._unpack_rest = partial(
            unpack, list_hook=self._on_list_of_rest, ext_hook=self._on_ext
        )

    def encode(self, message: Any) -> tuple[bytes, list[Buffer]]:
        """Return the body and the buffers of a message or of any value.

        Buffers are views of the arrays in the message, which must not change until
        the buffers are released.

        Raises:
            PayloadError: Something inside cannot be sent to another process.
        """
        buffers: list[Buffer] = []
        self._buffers = buffers
        self._has_marks = 0
        schema = self._schemas.get(type(message))
        try:
            if schema is None:
                values = [-1, self._encode_any(message), _FLAG]
            else:
                values = [schema.index, schema.encode(message), _FLAG]
            body: bytes = self._packer.pack(values)
        except (ValueError, OverflowError, TypeError, AttributeError) as error:
            raise PayloadError(
                f"a message cannot be encoded; got {type(message).__name__}: {error}; "
                f"expected nesting below 500 and bodies below 4 GiB; split it",
                got=type(message).__name__,
            ) from error
        finally:
            self._buffers = []
        return body, buffers

    def decode(self, body: Buffer, buffers: Sequence[Buffer]) -> Any:
        """Return the message; its arrays are read-only views of body and buffers.

        Those inside of pickled objects can be written, as objects had them.

        Raises:
            UnreadableError: A pickled value in it does not come back; `rest` is the
                message with an `Unread` in place of each.
            WireError: The bytes are no message that these classes could have made.
        """
        self._buffers = list(buffers)
        self._open_marks = self._num_pickles = 0
        try:
            # The last byte says whether there are marks: hooks cost 0.1 us per list.
            unpack = self._unpack_marked if body[-1] else self._unpack_plain
            index, fields, _ = unpack(body)
            return self._message(index, fields)
        except BaseException as error:  # a class that is unpickled may raise anything
            failure = self._failure(error, body)
            if failure is error:
                raise
            failure.__cause__ = error  # compiled code forgets `from`
            raise failure  # noqa: B904
        finally:
            self._buffers = []

    def _failure(self, error: BaseException, body: Buffer) -> BaseException:
        """Return what to raise for an error of decoding.

        Where all but what was pickled can be decoded, the frame is in order, and the
        class of that value, or of a key or a member of a set, is at fault.
        """
        if self._num_pickles:
            self._failed_pickle = self._num_pickles
            self._open_marks = self._num_pickles = 0
            with contextlib.suppress(Exception):
                index, fields, _ = self._unpack_rest(body)
                rest = self._message(index, fields)
                return UnreadableError(
                    f"a record does not unpickle where it came to; got "
                    f"{summary_of(error)}; expected what pickles to come back; mend its "
                    f"class, or send plain values",
                    rest=rest,
                )
        if isinstance(error, WireError) or not isinstance(error, Exception):
            return error
        kind = type(error).__name__
        return garbled(
            "a frame cannot be decoded",
            f"{kind}: {error}",
            "what a codec of this version encodes",
            cause=kind,
        )

    def _message(self, index: Any, fields: Any) -> Any:
        if self._open_marks:
            count = str(self._open_marks)
            raise garbled("a frame holds stray marks", count, "one per value")
        if index == -1:
            return fields
        if type(index) is not int or index < 0:
            raise garbled("a frame names no message", repr(index), "an index")
        return self._by_index[index].decode(fields)

    def _encode_any(self, value: Any) -> Any:
        """Prepare a user value; a list of many records travels by columns.

        One by one, a tuple costs 0.5 us, a numpy scalar 5, an object 50.
        """
        if type(value) is not list or len(value) < _MANY:
            return value
        kinds = set(map(type, value))
        if NATIVE.issuperset(kinds):
            return value
        self._has_marks = 1
        if columns := columns_of(value, kinds):
            return [_EXT[_ROWS], *map(self._encode_any, columns)]
        if (spread := as_array(value, kinds)) is not None:
            return [_EXT[_SPREAD], spread]
        if any(self._is_foreign(kind) for kind in kinds):
            return self._encode_pickle(value)
        return value

    def _is_foreign(self, kind: type[Any]) -> bool:
        return not (
            kind in NATIVE
            or kind in {list, dict}
            or kind in self._encoders
            or kind in PLAIN
            or issubclass(kind, np.generic)
        )

    def _encode_other(self, value: Any) -> Any:
        """Return msgpack's stand-in for a value that it cannot express."""
        if value is _FLAG:  # comes last, when all else has been encoded
            return self._has_marks
        self._has_marks = 1
        encoder = self._encoders.get(type(value))
        if encoder is not None:
            return encoder(value)
        if isinstance(value, np.generic):
            token = dtype_token(value.dtype)
            if token is not None:
                return [_EXT[_SCALAR], token, value.tobytes()]
        plain = encode_plain(value)
        if plain is not None:
            return [_EXT[_PLAIN], *plain]
        return self._encode_pickle(value)

    def _encode_array(self, array: Any) -> Any:
        token = dtype_token(array.dtype)
        if token is None:
            return self._encode_pickle(array)
        if array.nbytes < OUT_OF_BAND_BYTES:
            return [_EXT[_ARRAY], token, array.shape, array.tobytes()]
        self._buffers.append(raw_bytes(array))
        return [_EXT[_ARRAY], token, array.shape, len(self._buffers) - 1]

    def _encode_pickle(self, value: Any) -> Any:
        indices: list[int] = []

        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < OUT_OF_BAND_BYTES:
                return True
            indices.append(len(self._buffers))
            self._buffers.append(raw)
            return False

        try:
            pickled = self._dumps(value, keep_in_band)
        except BaseException as error:  # a class that is pickled may raise anything
            raise PayloadError(
                f"a record cannot be sent to another process; got "
                f"{type(value).__name__}: {summary_of(error)}; expected something that "
                f"pickles; "
                f"send plain values or arrays",
                got=type(value).__name__,
            ) from error
        return [_EXT[_PICKLE], pickled, indices]

    def _on_ext(self, code: int, data: bytes) -> _Mark:
        if data or not 0 <= code < len(_MARKS):
            raise garbled("a frame holds an unknown extension", str(code), "a mark")
        self._open_marks += 1
        return _MARKS[code]

    def _on_list(self, items: list[Any]) -> Any:
        if items and type(items[0]) is _Mark:
            self._open_marks -= 1
            return self._decoders[items[0].code](items)
        return items

    def _on_list_of_rest(self, items: list[Any]) -> Any:
        """As `_on_list`, but leave what is pickled alone."""
        if not items or type(items[0]) is not _Mark:
            return items
        code = items[0].code
        unread = {item for item in items if type(item) is Unread}
        if code == _PICKLE:
            self._open_marks -= 1
            self._num_pickles += 1
            is_failed = self._num_pickles == self._failed_pickle
            return Unread.FAILED if is_failed else Unread.UNTRIED
        if unread and code in (_ROWS, _SPREAD):  # a whole column was pickled
            self._open_marks -= 1
            return Unread.FAILED if Unread.FAILED in unread else Unread.UNTRIED
        return self._on_list(items)

    def _decode_array(self, items: list[Any]) -> Any:
        _, token, shape, where = items
        data = self._buffers[where] if type(where) is int and where >= 0 else where
        return array_from_bytes(token, shape, data)

    def _decode_message(self, items: list[Any]) -> Any:
        _, index, fields = items
        return self._by_index[index].decode(fields)

    def _decode_pickle(self, items: list[Any]) -> Any:
        if not self.allow_pickle:
            raise WireError(
                "a frame holds pickled code; got it from a peer that is not known; "
                "expected plain values; authenticate the peer"
            )
        _, pickled, indices = items
        buffers = [_writable(self._buffers[index]) for index in indices]
        self._num_pickles += 1
        return pickle.loads(pickled, buffers=buffers)  # noqa: S301 - authenticated


def _dumps(value: Any, callback: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    return pickle.dumps(value, protocol=5, buffer_callback=callback)


def _writable(buffer: Buffer) -> Buffer:
    """Return memory as objects have it, whichever way it came: a copy of what is lent."""
    return bytearray(buffer) if memoryview(buffer).readonly else buffer


def _encode_tuple(value: Any) -> Any:
    return [_EXT[_TUPLE], *value]


def _decode_tuple(items: list[Any]) -> Any:
    return tuple(items[1:])


def _message_encoder(schema: Schema) -> Callable[[Any], Any]:
    return lambda message: [_EXT[_MESSAGE], schema.index, schema.encode(message)]


def _decode_rows(items: list[Any]) -> Any:
    _, *columns = items
    return list(zip(*columns, strict=True))


def _decode_spread(items: list[Any]) -> Any:
    _, array = items
    return list(array)


def _decode_scalar(items: list[Any]) -> Any:
    _, token, data = items
    return array_from_bytes(token, [1], data)[0]


def _refuse_ext(code: int, data: bytes) -> Any:
    raise garbled(
        "a frame holds an extension where none was announced",
        f"code {code} with {len(data)} bytes",
        "plain values",
    )
