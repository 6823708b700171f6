//! Key=value pairs (RFC 7143 6.1), and how to split them over multiple PDUs.

/// Maximum length of a key, in bytes.
pub const MAX_KEY: usize = 63;

/// Maximum size of a text received in multiple PDUs, in bytes. This is more than enough for two
/// CHAP values of the maximum length and all existing keys.
pub const MAX_TEXT: usize = 16 << 10;

/// The reason why a text is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TextError {
    /// Missing `=` in a pair.
    #[error("missing = in a key=value pair")]
    NoEquals,
    /// The key is empty, too long, or contains an invalid character.
    #[error("invalid key")]
    Key,
    /// The value is not valid UTF-8 or contains a control character.
    #[error("invalid value: not UTF-8, or contains control characters")]
    Value,
    /// The text is larger than this limit.
    #[error("text is longer than {0} bytes")]
    TooLong(usize),
}

/// Returns the pairs in a text, in order. Empty pairs are ignored, because some peers send these as
/// padding.
pub fn pairs(text: &[u8]) -> impl Iterator<Item = Result<(&str, &str), TextError>> {
    text.split(|byte| *byte == 0)
        .filter(|pair| !pair.is_empty())
        .map(pair)
}

fn pair(bytes: &[u8]) -> Result<(&str, &str), TextError> {
    let equals = bytes.iter().position(|byte| *byte == b'=');
    // Only split at the first `=`, because it can also be used in the value (RFC 7143 6.1), e.g. at
    // the end of base64.
    let (key, value) = bytes.split_at(equals.ok_or(TextError::NoEquals)?);
    // A key should start with an upper case letter (RFC 7143 6.1), but this is not the case for
    // iSCSIProtocolLevel and iSERHelloRequired. `#` is used in X#NodeArchitecture.
    let is_key = (1..=MAX_KEY).contains(&key.len())
        && key
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b".-+@_#".contains(byte));
    if !is_key {
        return Err(TextError::Key);
    }
    let key = std::str::from_utf8(key).map_err(|_| TextError::Key)?;
    let value = std::str::from_utf8(&value[1..]).map_err(|_| TextError::Value)?;
    // Values may be written to a log file or terminal.
    if value.chars().any(char::is_control) {
        return Err(TextError::Value);
    }
    Ok((key, value))
}

/// Appends `key=value` and a NUL byte.
pub fn put_pair(out: &mut Vec<u8>, key: &str, value: &str) {
    out.extend_from_slice(key.as_bytes());
    out.push(b'=');
    out.extend_from_slice(value.as_bytes());
    out.push(0);
}

/// Used to receive a text in multiple PDUs.
#[derive(Debug)]
pub struct Collector {
    text: Vec<u8>,
    limit: usize,
}

impl Default for Collector {
    fn default() -> Self {
        Self::with_limit(MAX_TEXT)
    }
}

impl Collector {
    /// Creates a new collector with a limit of `limit` bytes.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self {
            text: Vec::new(),
            limit,
        }
    }

    /// Adds the text of a PDU. Returns the entire text if this was the last part.
    ///
    /// # Errors
    /// If the limit is exceeded, in which case the previous parts are dropped.
    pub fn add_part(&mut self, part: &[u8], continues: bool) -> Result<Option<Vec<u8>>, TextError> {
        // Check this first, because a peer could always set the C bit and let us buffer an
        // unlimited amount of data.
        if self.text.len() + part.len() > self.limit {
            self.text = Vec::new();
            return Err(TextError::TooLong(self.limit));
        }
        self.text.extend_from_slice(part);
        Ok((!continues).then(|| std::mem::take(&mut self.text)))
    }

    /// Returns the number of bytes received so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Returns whether no text is pending.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }
}

/// Used to send a text in multiple PDUs.
#[derive(Debug, Default)]
pub struct Outgoing {
    text: Vec<u8>,
    sent: usize,
}

impl Outgoing {
    /// Creates this with a text to send.
    #[must_use]
    pub fn new(text: Vec<u8>) -> Self {
        Self { text, sent: 0 }
    }

    /// Returns the next part, up to `limit` bytes, and whether more text will follow (C bit).
    pub fn next_part(&mut self, limit: u32) -> (&[u8], bool) {
        let end = self
            .text
            .len()
            .min(self.sent.saturating_add(limit as usize));
        let part = &self.text[self.sent..end];
        self.sent = end;
        (part, end < self.text.len())
    }

    /// Returns whether everything has been sent.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.sent == self.text.len()
    }
}
