"""The checksum that every line of results ends with: a line that was damaged or changed is not read as results.

It is the CRC-32 of the bytes before it, as the last property of the line: `…,"crc32":"9ae0daaf"}`. It finds every
change of up to four neighboring bytes, and of other changes all but one in four billion. It is no signature: whoever
wants to forge a line can compute it. What writes the line anew breaks it, as `jq -c` does, which spells numbers its own
way; what keeps or drops whole lines does not.
"""

import re
import zlib

import msgspec

NAME = "crc32"
MEANING = "CRC-32 of the bytes of the line before this property."
_END = re.compile(rb',"crc32":"([0-9a-f]{8})"}')


def with_checksum(line: bytes) -> bytes:
    """The line, a JSON object with some property, with its checksum."""
    body = line.removesuffix(b"}")
    return b'%s,"crc32":"%08x"}' % (body, zlib.crc32(body))


def check_line(line: bytes) -> None:
    """Raises `msgspec.ValidationError` where the line is not as it was written."""
    end = _END.fullmatch(line, max(0, len(line) - 20))
    if end is None:
        raise msgspec.ValidationError("it does not end with a checksum: it was cut short, or not written by `run`")
    if zlib.crc32(memoryview(line)[: end.start()]) != int(end[1], 16):
        raise msgspec.ValidationError("its checksum is another one: it was damaged, or changed after it was written")
