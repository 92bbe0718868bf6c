"""Reading TOML tables with messages that name the file, the key and the expected type."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

from stpart_compiler.cost_models.sizes import parse_bytes

_MISSING = object()


@dataclass
class Table:
    """One TOML table; every getter raises ValueError if its key is missing or of another type."""

    source: str
    prefix: str
    data: dict[str, Any]
    used: set[str] = field(default_factory=set)

    def where(self, key: str = "") -> str:
        """Source and dotted key, as messages name them."""
        name = ".".join(part for part in (self.prefix, key) if part)
        return f"{self.source}: key {name!r}"

    def string(self, key: str) -> str:
        value = self._get(key, "a string")
        if not isinstance(value, str):
            self._fail(key, "a string", value)
        return value

    def number(self, key: str) -> float:
        value = self._get(key, "a number")
        if not _is_number(value):
            self._fail(key, "a number", value)
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._get(key, "true or false")
        if not isinstance(value, bool):
            self._fail(key, "true or false", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None if the key is absent."""
        self.used.add(key)
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._fail(key, "a positive integer", value)
        return value

    def nbytes(self, key: str) -> int:
        """Bytes, as a number or a string such as "80GB"."""
        value = self._get(key, 'bytes such as "80GB"')
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{self.where(key)}: {error}") from None

    def points(self, key: str) -> tuple[tuple[float, float], ...]:
        """A list of pairs of numbers."""
        expected = "a list of [number, number]"
        value = self._get(key, expected)
        if not isinstance(value, list) or not all(_is_pair(point) for point in value):
            self._fail(key, expected, value)
        return tuple((float(x), float(y)) for x, y in value)

    def optional_number(self, key: str) -> float | None:
        """A number, or None if the key is absent."""
        self.used.add(key)
        return self.number(key) if key in self.data else None

    def optional_points(self, key: str) -> tuple[tuple[float, float], ...] | None:
        """A list of pairs of numbers, or None if the key is absent."""
        self.used.add(key)
        return self.points(key) if key in self.data else None

    def curves(self) -> tuple[tuple[str, tuple[tuple[float, float], ...]], ...]:
        """All entries of this table, each a list of pairs of numbers."""
        return tuple((key, self.points(key)) for key in self.data)

    def optional_strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None if the key is absent."""
        self.used.add(key)
        value = self.data.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            self._fail(key, "a list of strings", value)
        return None if value is None else tuple(value)

    def numbers(self) -> tuple[tuple[str, float], ...]:
        """All entries of this table, each a number."""
        return tuple((key, self.number(key)) for key in self.data)

    def strings(self) -> tuple[tuple[str, str], ...]:
        """All entries of this table, each a string."""
        return tuple((key, self.string(key)) for key in self.data)

    def optional_table(self, key: str) -> Table:
        """A table, empty if the key is absent."""
        self.used.add(key)
        return self.table(key) if key in self.data else self._child(key, {})

    def table(self, key: str) -> Table:
        value = self._get(key, "a table")
        if not isinstance(value, dict):
            self._fail(key, "a table", value)
        return self._child(key, value)

    def tables(self, key: str) -> list[Table]:
        """An array of tables."""
        expected = f"tables, each headed [[{key}]]"
        value = self._get(key, expected)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self._fail(key, expected, value)
        return [self._child(f"{key}[{i}]", item) for i, item in enumerate(value)]

    def check_no_more(self) -> None:
        """Raises:
        ValueError: the table has a key that nothing has read.
        """
        unknown = sorted(set(self.data) - self.used)
        if unknown:
            raise ValueError(f"{self.where(unknown[0])} is unknown; known here: {', '.join(sorted(self.used))}")

    def _child(self, key: str, data: dict[str, Any]) -> Table:
        return Table(self.source, ".".join(part for part in (self.prefix, key) if part), data)

    def _get(self, key: str, expected: str) -> Any:
        self.used.add(key)
        value = self.data.get(key, _MISSING)
        if value is _MISSING:
            raise ValueError(f"{self.where(key)} is missing; expected {expected}")
        return value

    def _fail(self, key: str, expected: str, value: object) -> NoReturn:
        raise ValueError(f"{self.where(key)}: expected {expected}, got {value!r}")


def read_toml(text: str, source: str) -> Table:
    """The root table of TOML text.

    Raises:
        ValueError: the text is no valid TOML.
    """
    try:
        return Table(source, "", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: no valid TOML: {error}") from None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(point: object) -> bool:
    return isinstance(point, list) and len(point) == 2 and all(_is_number(x) for x in point)
