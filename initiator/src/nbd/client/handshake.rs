//! Negotiation with a server: fixed newstyle, one option after the other.

use std::io::{self, Read, Write};

use thiserror::Error;

use crate::nbd::cursor::Cursor;
use crate::nbd::proto::{
    self, BASE_ALLOCATION, GREETING_LEN, MAX_OPTION, NBD_MAGIC, OLDSTYLE_MAGIC, OPTION_MAGIC,
    OPTION_REPLY_LEN, OPTION_REPLY_MAGIC, flag, handshake_flag, info, opt, rep,
};

/// Most replies to one option. A server sends one for each piece of information.
const MAX_REPLIES: usize = 64;

/// Outcome of a negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags of the export ([`flag`]).
    pub flags: u16,
    /// Smallest length and alignment of requests, in bytes; 1 where the server does not say.
    pub min_block: u32,
    /// Length and alignment that the server prefers, in bytes, if it says.
    pub preferred_block: Option<u32>,
    /// Longest read or write, in bytes.
    pub max_payload: u32,
    /// Replies may come in chunks.
    pub structured: bool,
    /// Number of the context `base:allocation`, if it was selected.
    pub allocation_context: Option<u32>,
}

/// Reason why a negotiation has failed.
#[derive(Debug, Error)]
pub enum HandshakeError {
    /// The connection failed or ended.
    #[error("the connection failed during the negotiation: {0}")]
    Io(#[from] io::Error),
    /// The first bytes are not those of an NBD server.
    #[error("no NBD server answers there: it begins with {0:#018x}")]
    Magic(u64),
    /// The server has oldstyle negotiation, or the first form of newstyle.
    #[error("the server does not speak fixed newstyle negotiation")]
    Oldstyle,
    /// A reply does not belong to the option that was sent.
    #[error("the server answers option {sent} with a reply to option {answered}")]
    OtherOption {
        /// Option that was sent.
        sent: u32,
        /// Option that the reply names.
        answered: u32,
    },
    /// A reply does not begin with its magic number.
    #[error("reply to option {option} begins with {magic:#018x}")]
    ReplyMagic {
        /// Option that was sent.
        option: u32,
        /// First eight bytes of the reply.
        magic: u64,
    },
    /// A reply is longer than any that exists, or malformed.
    #[error("reply of type {kind} to option {option} is malformed ({len} bytes)")]
    Malformed {
        /// Option that was sent.
        option: u32,
        /// Type of the reply.
        kind: u32,
        /// Length of its data, in bytes.
        len: u32,
    },
    /// The server answers one option without end.
    #[error("the server sends more than {MAX_REPLIES} replies to option {0}")]
    TooManyReplies(u32),
    /// The server has no such export.
    #[error("the server has no export `{export}`{}", said(.message))]
    UnknownExport {
        /// Name that was asked for.
        export: String,
        /// Explanation of the server; may be empty.
        message: String,
    },
    /// The server demands encryption.
    #[error("the server demands TLS, which is not supported{}", said(.0))]
    Tls(String),
    /// The server refuses an option.
    #[error("the server refuses option {option} with error {error}{}", said(.message))]
    Refused {
        /// Option that was sent.
        option: u32,
        /// Number of the error, without its highest bit.
        error: u32,
        /// Explanation of the server; may be empty.
        message: String,
    },
    /// The server ends the answer to `GO` without the size of the export.
    #[error("the server does not report the size of the export")]
    NoSize,
    /// Block sizes that break the protocol's rules.
    #[error("the server reports impossible block sizes: {min}, {preferred}, {max}")]
    BlockSizes {
        /// Minimum that was reported, in bytes.
        min: u32,
        /// Preferred size that was reported, in bytes.
        preferred: u32,
        /// Maximum that was reported, in bytes.
        max: u32,
    },
}

fn said(message: &str) -> String {
    match message {
        "" => String::new(),
        message => format!(": {message}"),
    }
}

/// Negotiates the use of an export. The stream waits for the server, for a time that its owner
/// bounds.
///
/// # Errors
/// [`HandshakeError`].
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
    // Structured replies come first: metadata contexts need them. A server that refuses either
    // serves reads and writes all the same.
    negotiated.structured = options.structured_reply()?;
    if negotiated.structured {
        negotiated.allocation_context = options.allocation_context()?;
    }
    if !options.go(&mut negotiated)? {
        options.export_name(&mut negotiated, no_zeroes)?;
    }
    if negotiated.flags & flag::HAS_FLAGS == 0 {
        // A server without flags is one without abilities.
        negotiated.flags = 0;
    }
    Ok(negotiated)
}

/// Exchanges the greeting. Returns whether the answer to `EXPORT_NAME` has no padding.
fn greet(stream: &mut (impl Read + Write)) -> Result<bool, HandshakeError> {
    // An oldstyle server and one that speaks another protocol may send less than a greeting, so the
    // first magic number is judged before more is awaited.
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

/// A reply to an option.
struct OptionReply {
    kind: u32,
    data: Vec<u8>,
}

impl OptionReply {
    fn is_error(&self) -> bool {
        self.kind >= 1 << 31
    }

    /// Text of an error for people.
    fn message(&self) -> String {
        let text = String::from_utf8_lossy(&self.data);
        // It goes to a terminal.
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

/// The phase of options.
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
        let (answered, kind, len) = (u32_of(), u32_of(), u32_of());
        if magic != OPTION_REPLY_MAGIC {
            return Err(HandshakeError::ReplyMagic {
                option: sent,
                magic,
            });
        }
        if answered != sent {
            return Err(HandshakeError::OtherOption { sent, answered });
        }
        // The length is the server's, so no memory is taken for it before it is judged.
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

    /// Returns the replies to an option up to the last: an acknowledgement or an error.
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

    /// Name of the export with its length before it.
    fn name(&self) -> Vec<u8> {
        let mut data = (self.export.len() as u32).to_be_bytes().to_vec();
        data.extend(self.export.as_bytes());
        data
    }

    /// Selects `base:allocation`. Returns the server's number of it, if the server has it.
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
        // An unknown export is reported by `GO`, with an error of its own.
        Ok(id.filter(|_| last.kind == rep::ACK))
    }

    /// Begins the transmission. Returns false where the server does not know the option.
    fn go(&mut self, negotiated: &mut Negotiated) -> Result<bool, HandshakeError> {
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

    /// Begins the transmission in the older way. A server that refuses the export hangs up.
    fn export_name(
        &mut self,
        negotiated: &mut Negotiated,
        no_zeroes: bool,
    ) -> Result<(), HandshakeError> {
        self.send(opt::EXPORT_NAME, self.export.as_bytes())?;
        let mut answer = [0; 10 + 124];
        let len = if no_zeroes { 10 } else { answer.len() };
        self.stream
            .read_exact(&mut answer[..len])
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => HandshakeError::UnknownExport {
                    export: self.export.to_owned(),
                    message: String::new(),
                },
                _ => error.into(),
            })?;
        let mut cursor = Cursor(&answer);
        negotiated.size = cursor.u64().expect("ten bytes");
        negotiated.flags = cursor.u16().expect("ten bytes");
        Ok(())
    }
}

/// Takes a piece of information about the export. Returns whether it is its size.
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
            // Block size constraints of the protocol document: powers of two, the minimum at most
            // 64 KiB, the preferred size at least 512 bytes, the maximum a multiple of the minimum
            // or without limit.
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
        // Names and descriptions are of no use here.
        _ => Ok(false),
    }
}
