"""BOINC's keys and signatures: 1024-bit RSA over the MD5 of a file or a string.

Sources: BOINC `lib/crypt.{h,cpp}`, `lib/crypt_prog.cpp`, `tools/sign_executable.cpp`. The algorithm is old
(MD5, 1024 bits, a padding without digest information) and cannot be changed: the stock client verifies it.
System crypto policies may refuse keys this short, so plain integer arithmetic stands in for the library.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

#: The only key length whose structures BOINC's fixed-size C code reads.
KEY_BITS = 1024
_MODULUS_BYTES = KEY_BITS // 8
_PRIME_BYTES = _MODULUS_BYTES // 2
_HEX_LINE = 64
_READ_BYTES = 1 << 20


class KeyFormatError(ValueError):
    """A key or signature text that is not in BOINC's format."""


@dataclass(frozen=True)
class PublicKey:
    """The half that clients get (`code_sign_public`) and the upload handler checks with (`upload_public`)."""

    modulus: int
    exponent: int

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Read the text of a public key file. Raises KeyFormatError."""
        fields = _parse_key(text, (_MODULUS_BYTES, _MODULUS_BYTES))
        return cls(*fields)

    def text(self) -> str:
        """The key file's text: bit count, hex lines, a line with a dot."""
        return _format_key([(self.modulus, _MODULUS_BYTES), (self.exponent, _MODULUS_BYTES)])

    def verify(self, data: bytes, signature: str) -> bool:
        """Whether `signature` (text form; white space is ignored) is this key's over `data`."""
        return self.verify_digest(hashlib.md5(data).hexdigest(), signature)

    def verify_digest(self, md5: str, signature: str) -> bool:
        """The same for data whose MD5 (32 lower-case hex digits) is already known."""
        try:
            raw = _parse_hex(signature)
        except KeyFormatError:
            return False
        if len(raw) != _MODULUS_BYTES or len(md5) != 32:
            return False
        value = int.from_bytes(raw, "big")
        if value >= self.modulus:
            return False
        return pow(value, self.exponent, self.modulus).to_bytes(_MODULUS_BYTES, "big") == _padded(md5)


@dataclass(frozen=True)
class PrivateKey:
    """A signing key (`code_sign_private`, `upload_private`)."""

    modulus: int
    public_exponent: int
    private_exponent: int
    prime_p: int
    prime_q: int
    exponent_p: int  # private exponent modulo p - 1
    exponent_q: int  # private exponent modulo q - 1
    coefficient: int  # inverse of q modulo p

    @classmethod
    def generate(cls) -> PrivateKey:
        """A new 1024-bit key."""
        from cryptography.hazmat.primitives.asymmetric import rsa

        numbers = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS).private_numbers()
        return cls(
            modulus=numbers.public_numbers.n,
            public_exponent=numbers.public_numbers.e,
            private_exponent=numbers.d,
            prime_p=numbers.p,
            prime_q=numbers.q,
            exponent_p=numbers.dmp1,
            exponent_q=numbers.dmq1,
            coefficient=numbers.iqmp,
        )

    @classmethod
    def parse(cls, text: str) -> PrivateKey:
        """Read the text of a private key file. Raises KeyFormatError."""
        sizes = (_MODULUS_BYTES,) * 3 + (_PRIME_BYTES,) * 5
        return cls(*_parse_key(text, sizes))

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.modulus, self.public_exponent)

    def text(self) -> str:
        """The key file's text."""
        return _format_key(
            [
                (self.modulus, _MODULUS_BYTES),
                (self.public_exponent, _MODULUS_BYTES),
                (self.private_exponent, _MODULUS_BYTES),
                (self.prime_p, _PRIME_BYTES),
                (self.prime_q, _PRIME_BYTES),
                (self.exponent_p, _PRIME_BYTES),
                (self.exponent_q, _PRIME_BYTES),
                (self.coefficient, _PRIME_BYTES),
            ]
        )

    def sign(self, data: bytes) -> str:
        """BOINC's signature of `data` in text form: four hex lines and a dot, each ended by a newline."""
        return self.sign_digest(hashlib.md5(data).hexdigest())

    def sign_file(self, path: Path) -> str:
        """The same for the contents of a file (what BOINC's `sign_executable` prints)."""
        return self.sign_digest(file_md5(path))

    def sign_digest(self, md5: str) -> str:
        """The same for data whose MD5 (32 lower-case hex digits) is already known."""
        try:
            signature = _sign_with_library(self, md5)
        except Exception:  # a crypto policy without short keys or old paddings; which error depends on it
            signature = self._sign_by_arithmetic(md5)
        return _format_hex(signature)

    def _sign_by_arithmetic(self, md5: str) -> bytes:
        """The same without a crypto library: slower, but nothing can forbid it."""
        message = int.from_bytes(_padded(md5), "big")
        # The Chinese remainder theorem makes this about four times faster than pow() by the full exponent.
        part_p = pow(message % self.prime_p, self.exponent_p, self.prime_p)
        part_q = pow(message % self.prime_q, self.exponent_q, self.prime_q)
        lift = (self.coefficient * (part_p - part_q)) % self.prime_p
        return (part_q + lift * self.prime_q).to_bytes(_MODULUS_BYTES, "big")


def _sign_with_library(key: PrivateKey, md5: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import padding, utils

    return _library_key(key).sign(md5.encode("ascii"), padding.PKCS1v15(), utils.NoDigestInfo())


@functools.lru_cache(maxsize=8)
def _library_key(key: PrivateKey) -> RSAPrivateKey:
    from cryptography.hazmat.primitives.asymmetric import rsa

    public = rsa.RSAPublicNumbers(key.public_exponent, key.modulus)
    return rsa.RSAPrivateNumbers(
        key.prime_p,
        key.prime_q,
        key.private_exponent,
        key.exponent_p,
        key.exponent_q,
        key.coefficient,
        public,
    ).private_key()


def file_md5(path: Path) -> str:
    """MD5 of a file's contents, as 32 lower-case hex digits."""
    digest = hashlib.md5()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def upload_certificate_text(name: str, max_nbytes: float) -> bytes:
    """What an upload certificate signs: an output file's name and size limit (`tools/backend_lib.cpp`)."""
    return f"<name>{name}</name><max_nbytes>{max_nbytes:.0f}</max_nbytes>".encode()


def write_key_pair(key_dir: Path, name: str) -> PrivateKey:
    """Make a key and write `NAME_private` (mode 0600) and `NAME_public` into `key_dir`."""
    key = PrivateKey.generate()
    key_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(key_dir / f"{name}_private", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(key.text())
    (key_dir / f"{name}_public").write_text(key.public.text())
    return key


def read_private_key(path: Path) -> PrivateKey:
    """Read a private key file; KeyFormatError names the file."""
    try:
        return PrivateKey.parse(path.read_text())
    except KeyFormatError as error:
        raise KeyFormatError(f"{path}: {error}") from error


def read_public_key(path: Path) -> PublicKey:
    """Read a public key file; KeyFormatError names the file."""
    try:
        return PublicKey.parse(path.read_text())
    except KeyFormatError as error:
        raise KeyFormatError(f"{path}: {error}") from error


def _padded(md5: str) -> bytes:
    """PKCS#1 v1.5 block type 1 around the 32 hex characters, without digest information."""
    message = md5.encode("ascii")
    filler = b"\xff" * (_MODULUS_BYTES - len(message) - 3)
    return b"\x00\x01" + filler + b"\x00" + message


def _format_hex(data: bytes) -> str:
    digits = data.hex()
    lines = [digits[start : start + _HEX_LINE] for start in range(0, len(digits), _HEX_LINE)]
    return "\n".join([*lines, ".", ""])


def _parse_hex(text: str) -> bytes:
    """Hex digits up to the first other character; white space in between is skipped."""
    digits = "".join(text.split()).partition(".")[0]
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise KeyFormatError("not hexadecimal") from None


def _format_key(fields: list[tuple[int, int]]) -> str:
    raw = b"".join(value.to_bytes(size, "big") for value, size in fields)
    return f"{KEY_BITS}\n{_format_hex(raw)}"


def _parse_key(text: str, sizes: tuple[int, ...]) -> list[int]:
    bits, _, rest = text.strip().partition("\n")
    if bits.strip() != str(KEY_BITS):
        raise KeyFormatError(f"BOINC keys have {KEY_BITS} bits, this one says {bits.strip()[:20]!r}")
    raw = _parse_hex(rest)
    if len(raw) != sum(sizes):
        raise KeyFormatError(f"the key has {len(raw)} bytes, expected {sum(sizes)}")
    values = []
    for size in sizes:
        values.append(int.from_bytes(raw[:size], "big"))
        raw = raw[size:]
    return values
