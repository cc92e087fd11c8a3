"""PIL images as maps of mode, shape and pixel bytes.

The in-tree serializer sends every image as uint8 and rebuilds it with `Image.fromarray(array, mode)`. What
that cannot rebuild is sent so that it still understands it, with a further key for decoders that know more:

- mode "1" goes as "L" with 0 and 255, and "__mode__" says that it was "1";
- palettes go in "__palette__" and "__palette_mode__" (without them "P" is shown in grey).

Modes of 16 and 32 bits ("I", "F", "I;16") go as 2 or 4 bytes a pixel; the in-tree decoder refuses them.
PIL is only imported where an image is met.
"""

from __future__ import annotations

import math
from typing import Any

from mori_mp.shared.errors import CorruptPayload

# Bytes per pixel, as Image.tobytes() gives them.
_PIXEL_BYTES = {
    "L": 1,
    "P": 1,
    "LA": 2,
    "La": 2,
    "PA": 2,
    "I;16": 2,
    "RGB": 3,
    "YCbCr": 3,
    "LAB": 3,
    "HSV": 3,
    "RGBA": 4,
    "RGBa": 4,
    "RGBX": 4,
    "CMYK": 4,
    "I": 4,
    "F": 4,
}
_PALETTE_MODES = ("RGB", "RGBA")
_MAX_EMPTY_SIDE = 0xFFFF
"""An image without pixels may still not claim more rows (PIL allocates a pointer for each)."""


def describe_image(image: Any) -> tuple[dict[str, Any], bytes]:
    """Return an image's map without its data, and the data: row-major bytes [height, width(, bytes)].

    Raises TypeError for a mode that has no plain bytes.
    """
    keys: dict[str, Any] = {"__pil_image__": True, "mode": image.mode}
    if image.mode == "1":
        image = image.convert("L")
        keys = {"__pil_image__": True, "mode": "L", "__mode__": "1"}
    depth = _PIXEL_BYTES.get(image.mode)
    if depth is None:
        raise TypeError(f"an image of mode {image.mode!r}")
    width, height = image.size
    keys["shape"] = [height, width] if depth == 1 else [height, width, depth]
    data = image.tobytes()  # first: this loads an image that was only opened
    if image.palette is not None and image.mode in ("P", "PA"):
        mode = "RGBA" if image.palette.mode == "RGBA" else "RGB"
        keys["__palette__"] = bytes(image.getpalette(mode) or ())
        keys["__palette_mode__"] = mode
    return keys, data


def restore_image(fields: dict[Any, Any], data: bytes | memoryview) -> Any:
    """Return a PIL image that owns its pixels. Raises CorruptPayload."""
    mode, shape = fields.get("mode"), fields.get("shape")
    depth = _PIXEL_BYTES.get(mode) if isinstance(mode, str) else None
    if not isinstance(mode, str) or depth is None:
        raise CorruptPayload(f"an image has the unknown mode {mode!r:.40}")
    if (
        not isinstance(shape, list)
        or not all(type(side) is int and 0 <= side < 1 << 31 for side in shape)
        or len(shape) != (2 if depth == 1 else 3)
        or (depth > 1 and shape[2] != depth)
        or math.prod(shape) != len(data)
        or (not data and max(shape) > _MAX_EMPTY_SIDE)
    ):
        raise CorruptPayload(f"an image of mode {mode} has {len(data)} bytes for the shape {shape!r:.100}")
    from PIL import Image

    try:
        image = Image.frombytes(mode, (shape[1], shape[0]), data)
        if fields.get("__palette__"):
            palette_mode = fields.get("__palette_mode__")
            if palette_mode not in _PALETTE_MODES:
                raise CorruptPayload(f"an image has a palette of the unknown mode {palette_mode!r:.40}")
            image.putpalette(fields["__palette__"], palette_mode)
    except (ValueError, TypeError, OverflowError, OSError) as error:
        raise CorruptPayload(
            f"an image of mode {mode} and shape {shape} cannot be rebuilt: {error}"
        ) from error
    if mode == "L" and fields.get("__mode__") == "1":
        return image.convert("1", dither=Image.Dither.NONE)
    return image
