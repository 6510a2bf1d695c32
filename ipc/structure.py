"""This module counts the values inside a msgpack value before a decoder builds them.

A decoder keeps the GIL for a whole frame: 30 ms for 8 MiB of empty maps. This count runs in Python, so other threads
can take the GIL. It skips a text of any length at once, and stops at its limit.
"""

__all__ = ["count_values"]

# by a value's first byte: its bytes (0 if a length follows), and the number of values inside it
_SIZES = [1] * 256
_ITEMS = [0] * 256
# by a first byte with a length after it: bytes of the length, further bytes not counted by it, values for each item
_LENGTHS: dict[int, tuple[int, int, int]] = {}

for _n in range(16):
    _ITEMS[0x80 + _n], _ITEMS[0x90 + _n] = 2 * _n, _n
for _n in range(32):
    _SIZES[0xA0 + _n] = 1 + _n
for _first, _size in zip(range(0xCA, 0xD9), (5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18), strict=True):
    _SIZES[_first] = _size
for _n in range(3):
    _LENGTHS[0xC4 + _n] = (1 << _n, 0, 0)
    _LENGTHS[0xC7 + _n] = (1 << _n, 1, 0)
    _LENGTHS[0xD9 + _n] = (1 << _n, 0, 0)
for _n in range(2):
    _LENGTHS[0xDC + _n] = (2 << _n, 0, 1)
    _LENGTHS[0xDE + _n] = (2 << _n, 0, 2)
for _first in _LENGTHS:
    _SIZES[_first] = 0


def count_values(data: memoryview, max_values: int, key: bytes) -> tuple[int, slice | None]:
    """Count a msgpack value and all values inside it, keys included, and find the value of one key.

    data        uint8 [n]; a container counts by the length that it states; the decoder reports broken data later
    max_values  the limit at which counting stops; the returned count is then above it
    key         an encoded key of the outermost map; its slice is None if the key was not found before the end
    Time: at most max_values iterations.
    """
    left, counted, place, end = 1, 0, 0, len(data)
    top = -1  # the value of `left` when the outermost map's next key or value begins
    begin = stop = -1
    while left and place < end and counted + left <= max_values:
        if left == top:
            if top % 2 == 0:  # a key
                if begin >= 0 > stop:
                    stop = place
                elif begin < 0 and data[place : place + len(key)] == key:
                    begin = place + len(key)
            top -= 1
        first = data[place]
        size = _SIZES[first]
        if size:
            place += size
            items = _ITEMS[first]
        else:
            width, beside, each = _LENGTHS[first]
            length = int.from_bytes(data[place + 1 : place + 1 + width], "big")
            place += 1 + width + (0 if each else beside + length)
            items = length * each
        counted += 1
        left += items - 1
        if counted == 1:
            top = left
    return counted + left, None if begin < 0 else slice(begin, place if stop < 0 else stop)
