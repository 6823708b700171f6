//! Request validation for the transmission phase.
//!
//! If a range exceeds the export, we return `ENOSPC` for commands which store data and `EINVAL`
//! otherwise, as required by the specification. If the export is read-only, writes return `EPERM`.

use super::fault::NbdFault;
use super::handshake::Handshake;
use super::proto::{Cookie, Errno, MAX_REQUEST, REQUEST_LEN, REQUEST_MAGIC, cmd, cmd_flag};

/// Error reply which is sent after the payload has been skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) cookie: Cookie,
    pub(super) error: Errno,
}

/// Validated request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdRequest {
    /// Client's request ID.
    pub cookie: Cookie,
    /// Request command.
    pub command: Command,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes; 0 for flush.
    pub len: u32,
}

/// Request command for this range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read the range from the device.
    Read {
        /// Reply with a single chunk.
        dont_fragment: bool,
    },
    /// Write the payload after the header.
    Write {
        /// Data must be on stable storage before sending the reply.
        fua: bool,
    },
    /// Flush all completed writes to stable storage.
    Flush,
    /// Contents are no longer needed.
    Trim {
        /// Changes must be on stable storage before sending the reply.
        fua: bool,
    },
    /// Contents will be read soon.
    Cache,
    /// Set contents to zero.
    WriteZeroes {
        /// Changes must be on stable storage before sending the reply.
        fua: bool,
        /// The space must remain allocated.
        no_hole: bool,
        /// Fail if zeroing isn't faster than a normal write.
        fast: bool,
    },
    /// Return allocation status.
    BlockStatus {
        /// Return a single extent.
        one: bool,
    },
}

impl NbdRequest {
    /// Number of payload bytes after a write header.
    #[must_use]
    pub fn payload(&self) -> Option<u32> {
        matches!(self.command, Command::Write { .. }).then_some(self.len)
    }
}

/// Validation result.
pub(super) enum Verdict {
    Accept(NbdRequest),
    Refuse {
        refusal: Refusal,
        /// The client expects a reply in chunks.
        chunked: bool,
        /// Number of payload bytes to skip first.
        payload: u32,
    },
    Disconnect,
}

/// Validates a request header.
pub(super) fn validate_request(
    header: &[u8; REQUEST_LEN],
    handshake: &Handshake,
) -> Result<Verdict, NbdFault> {
    let u16_at = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let u32_at = |at: usize| u32::from_be_bytes(*header[at..].first_chunk().expect("within 28"));
    let u64_at = |at: usize| u64::from_be_bytes(*header[at..].first_chunk().expect("within 28"));
    if u32_at(0) != REQUEST_MAGIC {
        return Err(NbdFault::RequestMagic(u32_at(0)));
    }
    let (flags, kind, cookie) = (u16_at(4), u16_at(6), Cookie(u64_at(8)));
    let (offset, len) = (u64_at(16), u32_at(24));
    if kind == cmd::DISC {
        return Ok(Verdict::Disconnect);
    }
    Ok(match plan_command(kind, flags, offset, len, handshake) {
        Ok(command) => Verdict::Accept(NbdRequest {
            cookie,
            command,
            offset,
            len,
        }),
        Err(error) => Verdict::Refuse {
            refusal: Refusal { cookie, error },
            chunked: handshake.structured && matches!(kind, cmd::READ | cmd::BLOCK_STATUS),
            payload: if kind == cmd::WRITE { len } else { 0 },
        },
    })
}

fn plan_command(
    kind: u16,
    flags: u16,
    offset: u64,
    len: u32,
    handshake: &Handshake,
) -> Result<Command, Errno> {
    let has = |flag: u16| flags & flag != 0;
    let fua = has(cmd_flag::FUA);
    let (command, allowed) = match kind {
        cmd::READ => {
            let dont_fragment = has(cmd_flag::DF);
            if dont_fragment && !handshake.structured {
                return Err(Errno::Inval);
            }
            (Command::Read { dont_fragment }, cmd_flag::DF)
        }
        cmd::WRITE => (Command::Write { fua }, 0),
        cmd::FLUSH => (Command::Flush, 0),
        cmd::TRIM => (Command::Trim { fua }, 0),
        cmd::CACHE => (Command::Cache, 0),
        cmd::WRITE_ZEROES => (
            Command::WriteZeroes {
                fua,
                no_hole: has(cmd_flag::NO_HOLE),
                fast: has(cmd_flag::FAST_ZERO),
            },
            cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
        ),
        cmd::BLOCK_STATUS if handshake.base_allocation => (
            Command::BlockStatus {
                one: has(cmd_flag::REQ_ONE),
            },
            cmd_flag::REQ_ONE,
        ),
        _ => return Err(Errno::Inval),
    };
    // FUA is allowed for all commands, but is ignored if the command doesn't write.
    if flags & !(allowed | cmd_flag::FUA) != 0 {
        return Err(Errno::Inval);
    }
    if command == Command::Flush {
        return if offset == 0 && len == 0 {
            Ok(command)
        } else {
            Err(Errno::Inval)
        };
    }
    let changes = matches!(kind, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
    if changes && handshake.export.read_only {
        return Err(Errno::Perm);
    }
    let moves_data = matches!(kind, cmd::READ | cmd::WRITE);
    if len == 0 || (moves_data && len > MAX_REQUEST) {
        return Err(Errno::Inval);
    }
    let end = offset.checked_add(u64::from(len));
    if end.is_none_or(|end| end > handshake.export.size) {
        return Err(match kind {
            cmd::WRITE | cmd::WRITE_ZEROES => Errno::NoSpc,
            _ => Errno::Inval,
        });
    }
    Ok(command)
}
