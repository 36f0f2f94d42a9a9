"""Letters for bytes in byte-level tokenizers."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)
}
"""The byte of each letter. Printable Latin-1 characters stand for themselves, and other bytes are
represented by letters from U+0100 on."""
