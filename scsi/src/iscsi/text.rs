//! key=value pairs (RFC 7143 6.1), and their way through several PDUs.

/// Longest key, in bytes.
pub const MAX_KEY: usize = 63;

/// Longest text that is collected over several PDUs, in bytes: two CHAP values of the longest kind
/// and every key there is fit many times.
pub const MAX_TEXT: usize = 16 << 10;

/// Reason for which text is not acceptable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TextError {
    /// A pair without `=`.
    #[error("a pair without =")]
    NoEquals,
    /// A key that is empty, too long, or has characters that no key has.
    #[error("a key that is no key")]
    Key,
    /// A value that is not UTF-8, or has control characters.
    #[error("a value with control characters")]
    Value,
    /// The text is longer than [`MAX_TEXT`].
    #[error("text of more than {MAX_TEXT} bytes")]
    TooLong,
}

/// The pairs of a text, in order. Empty pairs, which some peers send as padding, are passed over.
pub fn pairs(text: &[u8]) -> impl Iterator<Item = Result<(&str, &str), TextError>> {
    text.split(|byte| *byte == 0)
        .filter(|pair| !pair.is_empty())
        .map(pair)
}

fn pair(bytes: &[u8]) -> Result<(&str, &str), TextError> {
    let equals = bytes.iter().position(|byte| *byte == b'=');
    // At the first `=`: the value may have more of them (RFC 7143 6.1), as base64 has at its end.
    let (key, value) = bytes.split_at(equals.ok_or(TextError::NoEquals)?);
    // A key should begin with a capital letter (RFC 7143 6.1), but iSCSIProtocolLevel and
    // iSERHelloRequired do not. `#` is for X#NodeArchitecture.
    let is_key = (1..=MAX_KEY).contains(&key.len())
        && key
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b".-+@_#".contains(byte));
    if !is_key {
        return Err(TextError::Key);
    }
    let key = std::str::from_utf8(key).map_err(|_| TextError::Key)?;
    let value = std::str::from_utf8(&value[1..]).map_err(|_| TextError::Value)?;
    // Values reach logs and terminals.
    if value.chars().any(char::is_control) {
        return Err(TextError::Value);
    }
    Ok((key, value))
}

/// Appends `key=value` and its NUL.
pub fn put(out: &mut Vec<u8>, key: &str, value: &str) {
    out.extend_from_slice(key.as_bytes());
    out.push(b'=');
    out.extend_from_slice(value.as_bytes());
    out.push(0);
}

/// Collects text that comes in several PDUs.
#[derive(Debug, Default)]
pub struct Collector(Vec<u8>);

impl Collector {
    /// Takes the text of a PDU; the whole text once it does not go on.
    ///
    /// # Errors
    /// The text is longer than [`MAX_TEXT`]; what was collected is gone.
    pub fn take(&mut self, part: &[u8], continues: bool) -> Result<Option<Vec<u8>>, TextError> {
        // Checked before it is kept: with the C bit set for ever, a peer could have us collect
        // without end.
        if self.0.len() + part.len() > MAX_TEXT {
            self.0 = Vec::new();
            return Err(TextError::TooLong);
        }
        self.0.extend_from_slice(part);
        Ok((!continues).then(|| std::mem::take(&mut self.0)))
    }

    /// Number of bytes collected so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing waits for its end.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Text that goes out in as many PDUs as it needs.
#[derive(Debug, Default)]
pub struct Outgoing {
    text: Vec<u8>,
    sent: usize,
}

impl Outgoing {
    /// This text, from its beginning.
    #[must_use]
    pub fn new(text: Vec<u8>) -> Self {
        Self { text, sent: 0 }
    }

    /// The next part, of at most `limit` bytes, and whether more follows (C bit).
    pub fn next_part(&mut self, limit: u32) -> (&[u8], bool) {
        let end = self
            .text
            .len()
            .min(self.sent.saturating_add(limit as usize));
        let part = &self.text[self.sent..end];
        self.sent = end;
        (part, end < self.text.len())
    }

    /// Whether all was sent.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.sent == self.text.len()
    }
}
