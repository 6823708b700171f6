//! Fixed newstyle negotiation with a server, one option at a time.

use std::io::{self, Read, Write};

use thiserror::Error;

use crate::nbd::cursor::Cursor;
use crate::nbd::proto::{
    self, BASE_ALLOCATION, GREETING_LEN, MAX_OPTION, NBD_MAGIC, OLDSTYLE_MAGIC, OPTION_MAGIC,
    OPTION_REPLY_LEN, OPTION_REPLY_MAGIC, flag, handshake_flag, info, opt, rep,
};

/// Max replies for an option. The server sends a reply for each piece of information.
const MAX_REPLIES: usize = 64;

/// Negotiation result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Export size in bytes.
    pub size: u64,
    /// Transmission flags for the export ([`flag`]).
    pub flags: u16,
    /// Min request size and alignment in bytes; 1 if not reported by the server.
    pub min_block: u32,
    /// Preferred request size and alignment in bytes, if reported by the server.
    pub preferred_block: Option<u32>,
    /// Max read or write size in bytes.
    pub max_payload: u32,
    /// Replies can use chunks.
    pub structured: bool,
    /// ID of the context `base:allocation`, if selected.
    pub allocation_context: Option<u32>,
}

/// Negotiation error.
#[derive(Debug, Error)]
pub enum HandshakeError {
    /// Connection error, or the connection was closed.
    #[error("the connection failed during the negotiation: {0}")]
    Io(#[from] io::Error),
    /// The first bytes don't match an NBD server.
    #[error("not an NBD server: its greeting starts with {0:#018x}")]
    Magic(u64),
    /// The server uses oldstyle negotiation, or the initial form of newstyle.
    #[error("the server does not support fixed newstyle negotiation")]
    Oldstyle,
    /// Reply for a different option.
    #[error("the server sent a reply to option {received} instead of option {sent}")]
    OtherOption {
        /// Option which we sent.
        sent: u32,
        /// Option number in the reply.
        received: u32,
    },
    /// Reply with an invalid magic number.
    #[error("invalid magic {magic:#018x} of a reply to option {option}")]
    ReplyMagic {
        /// Option which we sent.
        option: u32,
        /// First eight bytes of the reply.
        magic: u64,
    },
    /// Reply which is malformed, or larger than any valid reply.
    #[error("malformed reply of type {kind} to option {option} ({len} bytes)")]
    Malformed {
        /// Option which we sent.
        option: u32,
        /// Reply type.
        kind: u32,
        /// Data length in bytes.
        len: u32,
    },
    /// Too many replies for the same option.
    #[error("the server sent more than {MAX_REPLIES} replies to option {0}")]
    TooManyReplies(u32),
    /// The server doesn't have this export.
    #[error("the server has no export `{export}`{}", show_message(.message))]
    UnknownExport {
        /// Requested name.
        export: String,
        /// Message from the server; can be empty.
        message: String,
    },
    /// The server requires encryption.
    #[error("the server requires TLS, which is not supported{}", show_message(.0))]
    Tls(String),
    /// The server rejected an option.
    #[error("the server rejected option {option} with error {error}{}", show_message(.message))]
    Refused {
        /// Option which we sent.
        option: u32,
        /// Error number, with the highest bit cleared.
        error: u32,
        /// Message from the server; can be empty.
        message: String,
    },
    /// The server completed `GO` but didn't send the export size.
    #[error("the server did not report the size of the export")]
    NoSize,
    /// Invalid block sizes.
    #[error("the server reported invalid block sizes: {min}, {preferred}, {max}")]
    BlockSizes {
        /// Reported minimum in bytes.
        min: u32,
        /// Reported preferred size in bytes.
        preferred: u32,
        /// Reported maximum in bytes.
        max: u32,
    },
}

fn show_message(message: &str) -> String {
    match message {
        "" => String::new(),
        message => format!(": {message}"),
    }
}

/// Negotiates access to an export. The stream blocks while waiting for the server, so the owner
/// should set a timeout.
///
/// # Errors
/// Returns [`HandshakeError`] if negotiation failed.
pub fn negotiate(
    stream: &mut (impl Read + Write),
    export: &str,
) -> Result<Negotiated, HandshakeError> {
    let no_zeroes = greet(stream)?;
    let mut negotiated = Negotiated {
        size: 0,
        flags: 0,
        min_block: 1,
        preferred_block: None,
        max_payload: proto::MAX_REQUEST,
        structured: false,
        allocation_context: None,
    };
    let mut options = Options { stream, export };
    // Structured replies must be negotiated first, because they're required for metadata contexts.
    // If the server rejects either option, we can still read and write.
    negotiated.structured = options.structured_reply()?;
    if negotiated.structured {
        negotiated.allocation_context = options.allocation_context()?;
    }
    if !options.negotiate_go(&mut negotiated)? {
        options.export_name(&mut negotiated, no_zeroes)?;
    }
    if negotiated.flags & flag::HAS_FLAGS == 0 {
        // If there are no flags, no features are supported.
        negotiated.flags = 0;
    }
    Ok(negotiated)
}

/// Exchanges the greeting. Returns whether the `EXPORT_NAME` reply is sent without padding.
fn greet(stream: &mut (impl Read + Write)) -> Result<bool, HandshakeError> {
    // An oldstyle server, or a different protocol, may send less data than a greeting. So we need
    // to check the first magic number before reading more.
    let mut greeting = [0; GREETING_LEN];
    stream.read_exact(&mut greeting[..8])?;
    let magic = |at: usize, greeting: &[u8]| {
        u64::from_be_bytes(*greeting[at..].first_chunk().expect("within the greeting"))
    };
    if magic(0, &greeting) != NBD_MAGIC {
        return Err(HandshakeError::Magic(magic(0, &greeting)));
    }
    stream.read_exact(&mut greeting[8..16])?;
    match magic(8, &greeting) {
        OPTION_MAGIC => {}
        OLDSTYLE_MAGIC => return Err(HandshakeError::Oldstyle),
        other => return Err(HandshakeError::Magic(other)),
    }
    stream.read_exact(&mut greeting[16..])?;
    let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
    if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(HandshakeError::Oldstyle);
    }
    let own = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    stream.write_all(&u32::from(own).to_be_bytes())?;
    Ok(own & handshake_flag::NO_ZEROES != 0)
}

/// Option reply.
struct OptionReply {
    kind: u32,
    data: Vec<u8>,
}

impl OptionReply {
    fn is_error(&self) -> bool {
        self.kind >= 1 << 31
    }

    /// Human-readable error text.
    fn message(&self) -> String {
        let text = String::from_utf8_lossy(&self.data);
        // This will be printed on a terminal.
        text.chars().filter(|c| !c.is_control()).collect()
    }

    fn malformed(&self, option: u32) -> HandshakeError {
        HandshakeError::Malformed {
            option,
            kind: self.kind,
            len: self.data.len() as u32,
        }
    }
}

/// Option phase.
struct Options<'a, S> {
    stream: &'a mut S,
    export: &'a str,
}

impl<S: Read + Write> Options<'_, S> {
    fn send(&mut self, option: u32, data: &[u8]) -> Result<(), HandshakeError> {
        Ok(self.stream.write_all(&proto::option(option, data))?)
    }

    fn reply(&mut self, sent: u32) -> Result<OptionReply, HandshakeError> {
        let mut header = [0; OPTION_REPLY_LEN];
        self.stream.read_exact(&mut header)?;
        let mut cursor = Cursor(&header);
        let mut u32_of = || cursor.u32().expect("20 bytes");
        let magic = u64::from(u32_of()) << 32 | u64::from(u32_of());
        let (received, kind, len) = (u32_of(), u32_of(), u32_of());
        if magic != OPTION_REPLY_MAGIC {
            return Err(HandshakeError::ReplyMagic {
                option: sent,
                magic,
            });
        }
        if received != sent {
            return Err(HandshakeError::OtherOption { sent, received });
        }
        // The length was sent by the server, so it must be checked before allocating memory.
        if len as usize > MAX_OPTION {
            return Err(HandshakeError::Malformed {
                option: sent,
                kind,
                len,
            });
        }
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data)?;
        Ok(OptionReply { kind, data })
    }

    /// Returns all replies for an option, up to the final acknowledgement or error.
    fn replies(
        &mut self,
        option: u32,
        mut each: impl FnMut(&OptionReply) -> Result<(), HandshakeError>,
    ) -> Result<OptionReply, HandshakeError> {
        for _ in 0..MAX_REPLIES {
            let reply = self.reply(option)?;
            if reply.kind == rep::ACK || reply.is_error() {
                return Ok(reply);
            }
            each(&reply)?;
        }
        Err(HandshakeError::TooManyReplies(option))
    }

    fn structured_reply(&mut self) -> Result<bool, HandshakeError> {
        self.send(opt::STRUCTURED_REPLY, &[])?;
        let last = self.replies(opt::STRUCTURED_REPLY, |_| Ok(()))?;
        if last.kind == rep::ERR_TLS_REQD {
            return Err(HandshakeError::Tls(last.message()));
        }
        Ok(last.kind == rep::ACK)
    }

    /// Length-prefixed export name.
    fn name(&self) -> Vec<u8> {
        let mut data = (self.export.len() as u32).to_be_bytes().to_vec();
        data.extend(self.export.as_bytes());
        data
    }

    /// Selects `base:allocation`. Returns the context ID used by the server, if supported.
    fn allocation_context(&mut self) -> Result<Option<u32>, HandshakeError> {
        let option = opt::SET_META_CONTEXT;
        let mut data = self.name();
        data.extend(1u32.to_be_bytes());
        data.extend((BASE_ALLOCATION.len() as u32).to_be_bytes());
        data.extend(BASE_ALLOCATION.as_bytes());
        self.send(option, &data)?;
        let mut id = None;
        let last = self.replies(option, |reply| {
            let mut cursor = Cursor(&reply.data);
            let number = cursor.u32().ok_or_else(|| reply.malformed(option))?;
            if reply.kind == rep::META_CONTEXT && cursor.0 == BASE_ALLOCATION.as_bytes() {
                id = Some(number);
            }
            Ok(())
        })?;
        // If the export is unknown, `GO` will return a specific error.
        Ok(id.filter(|_| last.kind == rep::ACK))
    }

    /// Starts the transmission phase. Returns false if the server doesn't support this option.
    fn negotiate_go(&mut self, negotiated: &mut Negotiated) -> Result<bool, HandshakeError> {
        let mut data = self.name();
        data.extend(1u16.to_be_bytes());
        data.extend(info::BLOCK_SIZE.to_be_bytes());
        self.send(opt::GO, &data)?;
        let mut has_size = false;
        let last = self.replies(opt::GO, |reply| {
            has_size |= take_info(reply, negotiated)?;
            Ok(())
        })?;
        match last.kind {
            rep::ACK if has_size => Ok(true),
            rep::ACK => Err(HandshakeError::NoSize),
            rep::ERR_UNSUP => Ok(false),
            rep::ERR_TLS_REQD => Err(HandshakeError::Tls(last.message())),
            rep::ERR_UNKNOWN => Err(HandshakeError::UnknownExport {
                export: self.export.to_owned(),
                message: last.message(),
            }),
            error => Err(HandshakeError::Refused {
                option: opt::GO,
                error: error & !(1 << 31),
                message: last.message(),
            }),
        }
    }

    /// Starts the transmission phase using the old option. If the server rejects the export, it
    /// closes the connection.
    fn export_name(
        &mut self,
        negotiated: &mut Negotiated,
        no_zeroes: bool,
    ) -> Result<(), HandshakeError> {
        self.send(opt::EXPORT_NAME, self.export.as_bytes())?;
        let mut reply = [0; 10 + 124];
        let len = if no_zeroes { 10 } else { reply.len() };
        self.stream
            .read_exact(&mut reply[..len])
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => HandshakeError::UnknownExport {
                    export: self.export.to_owned(),
                    message: String::new(),
                },
                _ => error.into(),
            })?;
        let mut cursor = Cursor(&reply);
        negotiated.size = cursor.u64().expect("ten bytes");
        negotiated.flags = cursor.u16().expect("ten bytes");
        Ok(())
    }
}

/// Handles export information. Returns whether it contains the size.
fn take_info(reply: &OptionReply, negotiated: &mut Negotiated) -> Result<bool, HandshakeError> {
    let malformed = || reply.malformed(opt::GO);
    let mut cursor = Cursor(&reply.data);
    let kind = cursor.u16().ok_or_else(malformed)?;
    if reply.kind != rep::INFO {
        return Ok(false);
    }
    match kind {
        info::EXPORT => {
            let size = cursor.u64();
            let flags = cursor.u16();
            (negotiated.size, negotiated.flags) = size.zip(flags).ok_or_else(malformed)?;
            cursor.finish().ok_or_else(malformed)?;
            Ok(true)
        }
        info::BLOCK_SIZE => {
            let mut size = || cursor.u32().ok_or_else(malformed);
            let (min, preferred, max) = (size()?, size()?, size()?);
            cursor.finish().ok_or_else(malformed)?;
            // Constraints from the protocol specification: sizes are powers of two, min is at most
            // 64 KiB, preferred is at least 512 bytes, and max is a multiple of min or unlimited.
            let is_possible = min.is_power_of_two()
                && min <= 65536
                && preferred.is_power_of_two()
                && preferred >= min.max(512)
                && max >= min
                && (max == u32::MAX || max.is_multiple_of(min));
            if !is_possible {
                return Err(HandshakeError::BlockSizes {
                    min,
                    preferred,
                    max,
                });
            }
            negotiated.min_block = min;
            negotiated.preferred_block = Some(preferred);
            negotiated.max_payload = max;
            Ok(false)
        }
        // We don't use names and descriptions.
        _ => Ok(false),
    }
}
