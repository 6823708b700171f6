//! CHAP (RFC 1994, RFC 7143 12.1.3): digests, and the encoding of binary values.

use md5::Md5;
use sha1::Digest;
use sha1::Sha1;
use sha2::Sha256;
use sha3::Sha3_256;
use subtle::ConstantTimeEq;

/// Maximum length of a binary value when decoded, in bytes (RFC 7143 12.1.3: 1024).
pub const MAX_BINARY: usize = 1024;

/// Maximum length of a CHAP response, in bytes.
const MAX_RESPONSE: usize = 32;

/// Length of the challenges that we create, in bytes.
pub const CHALLENGE_LEN: usize = 32;

/// Digest algorithm, identified by a number in CHAP_A.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Algorithm {
    /// MD5, number 5 (RFC 1994).
    Md5 = 5,
    /// SHA-1, number 6 in the IANA list of PPP authentication algorithms.
    Sha1 = 6,
    /// SHA-256, number 7 in the IANA list of PPP authentication algorithms.
    Sha256 = 7,
    /// SHA3-256, number 8 in the IANA list of PPP authentication algorithms.
    Sha3_256 = 8,
}

/// All algorithms, sorted from strongest to weakest.
pub const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::Sha3_256,
    Algorithm::Sha256,
    Algorithm::Sha1,
    Algorithm::Md5,
];

impl Algorithm {
    /// Returns the name used in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Md5 => "md5",
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha3_256 => "sha3-256",
        }
    }

    /// Returns the algorithm for a number.
    #[must_use]
    pub fn of(number: &str) -> Option<Self> {
        let number = number.parse::<u8>().ok()?;
        ALGORITHMS.into_iter().find(|a| *a as u8 == number)
    }

    /// Returns the response, which is a digest of the identifier, secret and challenge.
    #[must_use]
    pub fn respond(self, id: u8, secret: &[u8], challenge: &[u8]) -> Vec<u8> {
        fn over<D: Digest>(parts: [&[u8]; 3]) -> Vec<u8> {
            let mut digest = D::new();
            parts.into_iter().for_each(|part| digest.update(part));
            digest.finalize().to_vec()
        }
        let parts = [&[id], secret, challenge];
        match self {
            Self::Md5 => over::<Md5>(parts),
            Self::Sha1 => over::<Sha1>(parts),
            Self::Sha256 => over::<Sha256>(parts),
            Self::Sha3_256 => over::<Sha3_256>(parts),
        }
    }
}

/// Returns whether two secrets or responses are equal, using constant time.
#[must_use]
pub fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.ct_eq(b).into()
}

/// A name with a secret. The secret is hidden in debug output.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// CHAP_N: the name, encoded as UTF-8.
    pub name: String,
    /// The shared secret.
    pub secret: Vec<u8>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A challenge that has been sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Challenge {
    /// The negotiated algorithm.
    pub algorithm: Algorithm,
    /// CHAP_I: identifier of the challenge.
    pub id: u8,
    /// CHAP_C: the challenge.
    pub bytes: [u8; CHALLENGE_LEN],
}

impl Challenge {
    /// Returns whether the peer has sent a valid response in CHAP_R for this secret.
    #[must_use]
    pub fn is_valid_response(&self, response: &str, secret: &[u8]) -> bool {
        // This is large enough for any digest. A longer response is invalid, so we don't need to
        // decode all of it.
        let mut bytes = [0; MAX_RESPONSE];
        let Some(len) = decode_into(response, &mut bytes) else {
            return false;
        };
        is_equal(
            &bytes[..len],
            &self.algorithm.respond(self.id, secret, &self.bytes),
        )
    }
}

/// Parses a CHAP_I value, which is a single byte in decimal or hex.
#[must_use]
pub fn parse_id(value: &str) -> Option<u8> {
    super::keys::parse_number(value).and_then(|n| u8::try_from(n).ok())
}

/// Encodes a binary value as hex.
#[must_use]
pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = String::with_capacity(2 + 2 * bytes.len());
    out.push_str("0x");
    for byte in bytes {
        out.push(char::from(DIGITS[usize::from(byte >> 4)]));
        out.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    out
}

/// Decodes a binary value. This is either `0x` with a hex string, or `0b` with base64. Returns
/// `None` for any other format, if the value is empty, or if it's longer than [`MAX_BINARY`].
#[must_use]
pub fn decode(value: &str) -> Option<Vec<u8>> {
    let mut bytes = [0; MAX_BINARY];
    decode_into(value, &mut bytes).map(|len| bytes[..len].to_vec())
}

/// Decodes a binary value to `out` and returns the length. This never writes past the end of the
/// buffer.
#[must_use]
pub fn decode_into(value: &str, out: &mut [u8]) -> Option<usize> {
    // Use bytes instead of characters, because the value can be any UTF-8 string, so this index may
    // be in the middle of a character.
    let (form, digits) = value.as_bytes().split_at_checked(2)?;
    if digits.is_empty() {
        return None;
    }
    match form {
        b"0x" | b"0X" => decode_hex(digits, out),
        b"0b" | b"0B" => decode_base64(digits, out),
        _ => None,
    }
}

/// If the number of digits is odd, a leading zero is missing.
fn decode_hex(digits: &[u8], out: &mut [u8]) -> Option<usize> {
    let len = digits.len().div_ceil(2);
    let out = out.get_mut(..len)?;
    // RFC 7143 6.1: n digits are used for (n + 1) / 2 bytes, starting with the most significant
    // digit.
    let (mut at, skipped) = (0, digits.len() % 2);
    out.fill(0);
    for (place, digit) in digits.iter().enumerate() {
        let value = char::from(*digit).to_digit(16)? as u8;
        out[at] = out[at] << 4 | value;
        if (place + skipped) % 2 == 1 {
            at += 1;
        }
    }
    Some(len)
}

fn decode_base64(digits: &[u8], out: &mut [u8]) -> Option<usize> {
    let end = digits
        .iter()
        .position(|d| *d == b'=')
        .unwrap_or(digits.len());
    let (digits, pad) = digits.split_at(end);
    // Padding is optional, but must not be invalid. A single digit is not enough for a byte.
    let pad_is_right = match digits.len() % 4 {
        0 => pad.is_empty(),
        2 => pad.is_empty() || pad == b"==",
        3 => pad.is_empty() || pad == b"=",
        _ => false,
    };
    if !pad_is_right || digits.is_empty() {
        return None;
    }
    let len = digits.len() * 3 / 4;
    let out = out.get_mut(..len)?;
    let (mut bits, mut held, mut at) = (0u32, 0, 0);
    for digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            out[at] = (bits >> held) as u8;
            at += 1;
        }
    }
    // Any unused bits must be zero, otherwise there could be two strings for the same value.
    (bits & ((1 << held) - 1) == 0).then_some(len)
}
