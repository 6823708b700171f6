//! Command descriptor block of a command, and the direction and length of its data.

/// Maximum length of a command descriptor block in a [`Cdb`], in bytes.
pub const MAX_CDB: usize = 32;

/// A command descriptor block of up to [`MAX_CDB`] bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cdb {
    bytes: [u8; MAX_CDB],
    len: u8,
}

impl Cdb {
    /// Copies `bytes`; returns `None` if it is empty or too long.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut cdb = Self {
            bytes: [0; MAX_CDB],
            len: u8::try_from(bytes.len()).ok().filter(|l| *l > 0)?,
        };
        cdb.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(cdb)
    }

    /// Returns the bytes of the CDB as sent.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Returns the operation code in byte 0.
    #[must_use]
    pub fn opcode(&self) -> u8 {
        self.bytes[0]
    }

    /// Returns the 16 bytes that are always part of SRP_CMD.
    pub(crate) fn fixed(&self) -> [u8; 16] {
        self.bytes[..16].try_into().expect("sixteen of thirty-two")
    }

    /// Returns the remaining bytes, padded to words.
    pub(crate) fn additional(&self) -> &[u8] {
        let len = usize::from(self.len).max(16).next_multiple_of(4);
        &self.bytes[16..len]
    }
}

impl std::fmt::Debug for Cdb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cdb({:02x?})", self.as_bytes())
    }
}

/// Direction of a command's data, and its length in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataLen {
    /// The command has no data.
    #[default]
    None,
    /// Data from the target.
    In(u32),
    /// Data to the target.
    Out(u32),
}
