"""Reading and describing a Struct of configuration keys: the machinery under mori_mp.config.

A Struct lists the keys. Each field is ``Annotated[type, Meta(bounds), key(meaning, ...)]``: msgspec checks
type and bounds, key() adds meaning, unit, wording and where needed a reader, which brings a loose spelling
("512MiB", "XGMI", a bare ``off``, which YAML reads as false) into the field's own type. read_keys(),
describe() and markdown_table() walk that one list. Nothing here knows any particular key.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as mi

logger = logging.getLogger(__name__)

Reader = Callable[[Any], Any]

# How alike (0..1) an unknown key must be to one of ours to count as misspelt. High enough that no key of the
# host's own deploy files and connectors reaches it; tests/test_config.py holds that list.
NEAR_MISS = 0.85

_SIZE_WORDS = "a whole number, or text such as 512MiB = 512M (powers of 1024) or 1GB (of 1000);"


def key(
    meaning: str,
    *,
    unit: str = "",
    allowed: str = "",
    read: Reader | None = None,
    mistaken: tuple[str, ...] = (),
) -> msgspec.Meta:
    """Describe one key; `allowed` and `read` default to what the field's type says.

    mistaken: names that people give it and that look too little like it to count as misspelt.
    """
    extra = {"unit": unit, "allowed": allowed, "read": read, "mistaken": mistaken}
    return msgspec.Meta(description=meaning, extra=extra)


def size_key(meaning: str, *, mistaken: tuple[str, ...] = ()) -> msgspec.Meta:
    """Describe a key that holds a number of bytes, which may be given as text."""
    return key(meaning, unit="bytes", read=read_size, mistaken=mistaken)


class KeyDoc(msgspec.Struct, frozen=True):
    """One configuration key, for documentation. `default` is msgspec.NODEFAULT where the key is required."""

    name: str
    type: str
    default: Any
    unit: str
    meaning: str
    allowed: str


# ---- readers: from a loose spelling to the field's type; ValueError where that cannot be done


def read_int(value: Any) -> Any:
    """Plain digits in a string as a whole number (msgspec alone would also take "1e9" and "5.0")."""
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,19}", value):
        raise ValueError(value)
    return value


def read_size(value: Any) -> Any:
    """Bytes from a number or from text: "512MiB" and "512M" are powers of 1024, "512MB" of 1000.

    A bare letter means what it does for memory limits of Docker, cgroups and PostgreSQL.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(?:b|([kmgt])(i?b)?)?", value, re.IGNORECASE)
    if match is None:
        raise ValueError(value)
    power = " kmgt".index((match[2] or " ").lower())
    size = Decimal(match[1]) * (1000 if (match[3] or "").lower() == "b" else 1024) ** power
    if size != int(size):
        raise ValueError(value)
    return int(size)


def read_lower(value: Any) -> Any:
    """Text in lower case; anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def read_cpulist(value: Any) -> Any:
    """A kernel cpulist such as "0-3,8", checked for syntax; YAML gives a single CPU as a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(value)
    value = re.sub(r"\s*([,-])\s*", r"\1", value.strip())
    for part in value.split(",") if value else ():
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(value)
    return value


def read_cpulists(value: Any) -> Any:
    """One cpulist, or several separated by "|", none of them empty."""
    lists = [read_cpulist(part) for part in (value.split("|") if isinstance(value, str) else [value])]
    if len(lists) > 1 and "" in lists:
        raise ValueError(value)
    return "|".join(lists)


def _choice_reader(choices: tuple[Any, ...], first: Reader | None) -> Reader:
    spelled = {choice.lower(): choice for choice in choices}

    def read(value: Any) -> Any:
        value = first(value) if first is not None else value
        return spelled.get(value.lower(), value) if isinstance(value, str) else value

    return read


# ---- the list of keys


class Field(NamedTuple):
    doc: KeyDoc
    hint: Any  # the field's whole annotation, for msgspec.convert
    read: Reader
    nested: type[msgspec.Struct] | None
    mistaken: tuple[str, ...]


@cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """The keys of `struct` in order. Every field must carry a key()."""
    return {info.name: _field(info) for info in msgspec.structs.fields(struct)}


def defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """What the keys of `struct` are where they are not given."""
    return {name: field.doc.default for name, field in fields_of(struct).items()}


def _field(info: msgspec.structs.FieldInfo) -> Field:
    node = mi.type_info(info.type)
    if not isinstance(node, mi.Metadata) or node.extra is None or node.extra_json_schema is None:
        raise TypeError(f"{info.name} carries no key()")
    read: Reader | None = node.extra["read"]
    nested: type[msgspec.Struct] | None = None
    kind = node.type
    if isinstance(kind, mi.UnionType):  # `X | None`
        kind = next(member for member in kind.types if not isinstance(member, mi.NoneType))
    if isinstance(kind, mi.LiteralType):
        name, allowed = "str", ", ".join(f"`{choice}`" if choice else "empty" for choice in kind.values)
        read = _choice_reader(kind.values, read)
    elif isinstance(kind, mi.IntType):
        words = _SIZE_WORDS if read is read_size else "a whole number,"
        name, allowed, read = "int", _bounds(words, kind), read or read_int
    elif isinstance(kind, mi.FloatType):
        name, allowed = "float", _bounds("a number,", kind)
    elif isinstance(kind, mi.BoolType):
        name, allowed = "bool", "`true`, `false`"
    elif isinstance(kind, mi.StructType):
        name, allowed, nested = "mapping", "a mapping of the keys below", kind.cls
    else:
        name, allowed = "str", "text"
    doc = KeyDoc(
        name=info.name,
        type=name,
        default=info.default,
        unit=node.extra["unit"],
        meaning=node.extra_json_schema["description"],
        allowed=node.extra["allowed"] or allowed,
    )
    return Field(doc, info.type, read or (lambda value: value), nested, node.extra["mistaken"])


def _bounds(words: str, kind: mi.IntType | mi.FloatType) -> str:
    """What a number may be; `words` end in the mark that its bounds follow."""
    low = None if kind.ge is None else _number(kind.ge)
    high = None if kind.le is None else _number(kind.le)
    if kind.gt is not None:
        low = f"above {_number(kind.gt)}"
    if low is None or high is None:
        return words[:-1] if low is None else f"{words} {low} or more"
    return f"{words} {low}, at most {high}" if kind.gt is not None else f"{words} {low}..{high}"


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if power >= 30 and value == 1 << power else f"{value:.10g}"


# ---- reading


def read_keys(
    struct: type[msgspec.Struct], given: Mapping[Any, Any], problems: list[str], prefix: str = ""
) -> dict[str, Any]:
    """The values of the keys of `struct` that `given` holds and that are sound.

    Absent and null keys are left out. A line for each unsound or missing key is appended to `problems`.
    """
    found: dict[str, Any] = {}
    fields = fields_of(struct)
    for name, field in fields.items():
        raw, before = given.get(name), len(problems)
        if raw is None:
            if field.doc.default is msgspec.NODEFAULT:
                odd = ", ".join(repr(entry) for entry in given if entry not in fields)
                instead = f", and {odd} is not a key of {prefix.rstrip('.')}" if odd and prefix else ""
                problems.append(f"{prefix}{name}: missing{instead}; allowed: {field.doc.allowed}")
        elif field.nested is not None and isinstance(raw, Mapping):
            values = read_keys(field.nested, raw, problems, f"{prefix}{name}.")
            if len(problems) == before:
                found[name] = field.nested(**values)
        else:
            try:
                found[name] = _read_one(field, raw)
            except ValueError as refused:
                problems.append(f"{prefix}{name}: {refused}")
    return found


def _read_one(field: Field, raw: Any) -> Any:
    """The value of one key; ValueError with the rest of the line where there is none."""
    value, unset = _expand(raw) if isinstance(raw, str) else (raw, [])
    if unset:
        raise ValueError(
            f"got {show(raw)}, but the environment does not set {', '.join(unset)};"
            " set it, or write the value itself"
        )
    try:
        return msgspec.convert(field.read(value), field.hint, strict=False)
    except (ValueError, msgspec.ValidationError):
        origin = f" (from {show(raw)})" if isinstance(raw, str) and value != raw else ""
        raise ValueError(f"got {show(value)}{origin}; allowed: {field.doc.allowed}") from None


_VARIABLE = re.compile(r"\$(?:\{([^}]+)\}|([A-Za-z_][A-Za-z0-9_]*))")


def _expand(text: str) -> tuple[str, list[str]]:
    """`text`, stripped, with $VAR and ${VAR} replaced; and the names of those that are not set."""
    names = {braced or plain for braced, plain in _VARIABLE.findall(text)}
    unset = sorted(name for name in names if name not in os.environ)
    return _VARIABLE.sub(lambda m: os.environ.get(m[1] or m[2], m[0]), text).strip(), unset


# ---- keys that are nearly ours


def misspelt(struct: type[msgspec.Struct], given: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """A warning for each key of `given` that is not one of `struct` but nearly, also in nested mappings."""
    fields = fields_of(struct)
    found = []
    for name, value in given.items():
        if name in fields:
            nested = fields[name].nested
            if nested is not None and isinstance(value, Mapping):
                found += misspelt(nested, value, f"{prefix}{name}.")
        elif isinstance(name, str) and (meant := _meant(struct, name)):
            found.append(
                f"configuration key {prefix + name!r} is not one of the connector's and has no effect on it; "
                f"did you mean {prefix + meant!r}?"
            )
    return found


@cache
def _meant(struct: type[msgspec.Struct], unknown: str) -> str:
    fields = fields_of(struct)
    return next((name for name, field in fields.items() if unknown in field.mistaken), "") or nearest(
        unknown, fields
    )


def nearest(unknown: str, names: Iterable[str]) -> str:
    """The one of `names` that `unknown` is nearly, or ""; case, underscores and hyphens do not count."""
    if unknown.startswith("_") or unknown[-1:].isdigit():  # private, or numbered such as from_stage_0
        return ""
    plain = {_squeezed(name): name for name in names}
    near = difflib.get_close_matches(_squeezed(unknown), plain, n=1, cutoff=NEAR_MISS)
    return plain[near[0]] if near else ""


def _squeezed(name: str) -> str:
    return re.sub(r"[_\-\s]", "", name).lower()


@cache  # remembers what was said
def warn_once(text: str) -> None:
    """Log a warning, once per process."""
    logger.warning("%s", text)


def show(value: Any) -> str:
    """repr() for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# ---- documentation


def describe(struct: type[msgspec.Struct], prefix: str = "") -> list[KeyDoc]:
    """Every key of `struct` in order; those of a nested mapping follow it with dotted names."""
    docs: list[KeyDoc] = []
    for name, field in fields_of(struct).items():
        docs.append(msgspec.structs.replace(field.doc, name=prefix + name))
        if field.nested is not None:
            docs += describe(field.nested, f"{prefix}{name}.")
    return docs


def markdown_table(docs: list[KeyDoc]) -> str:
    """`docs` as a Markdown table, without a final newline."""
    rows = [("Key", "Type", "Default", "Unit", "Meaning", "Allowed"), ("---",) * 6]
    for doc in docs:
        row = (f"`{doc.name}`", doc.type, _default_text(doc.default), doc.unit, doc.meaning, doc.allowed)
        rows.append(row)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _default_text(default: Any) -> str:
    if default is msgspec.NODEFAULT:
        return "required"
    if default is None or default == "":
        return "unset" if default is None else "empty"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
