//! State machine for an NBD server connection: bytes in, events and bytes out.
//!
//! ```text
//! ClientFlags ──> Options ──EXPORT_NAME, GO──> Request <──payload done──> Payload
//!                  │  ▲                          │  ▲
//!        too long  ▼  │                 refused  ▼  │
//!                SkipOption              write  SkipPayload
//!  any of them ──fault, ABORT, DISC──> Closed
//! ```
//!
//! Call [`Machine::new`] first. Then, in a loop, send the output returned by
//! [`Machine::poll_output`], and pass received data to [`Machine::handle`], which consumes the
//! input for one step. If there is a [`Event::Request`] for a write, the stream continues with the
//! payload: the driver should receive these bytes directly into a buffer and then call
//! [`Machine::handle_payload`].

use riser_state::become_state;

use super::Export;
use super::fault::NbdFault;
use super::handshake::{self, Handshake, Phase};
use super::proto::{
    self, MAX_OPTION, MAX_SKIPPED_OPTION, OPTION_LEN, REQUEST_LEN, handshake_flag, opt,
};
use super::transmission::{self, NbdRequest, Refusal, Verdict};

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// New request from the client. It has been validated, and is within the export.
    Request(NbdRequest),
    /// The client has disconnected; requests in flight can still complete.
    Disconnect,
}

/// Result of a call to [`Machine::handle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of input bytes consumed. If it is 0 and there is no event, more data is required.
    pub consumed: usize,
    /// Event caused by these bytes.
    pub event: Option<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The greeting has been sent; wait for the client flags, four bytes.
    ClientFlags,
    Options,
    /// Skip the remaining data for an option which was rejected because of its length.
    SkipOption {
        left: u32,
    },
    Request,
    /// Payload for a write request.
    Payload {
        left: u32,
    },
    /// Payload for a rejected write; the error is sent after it.
    SkipPayload {
        left: u32,
        reply: Refusal,
    },
    /// The connection is closed.
    Closed,
}

impl riser_state::State for State {
    fn may_become(&self, next: &Self) -> bool {
        use State::{Closed, Options, Payload, Request, SkipOption, SkipPayload};
        match self {
            Self::ClientFlags => matches!(next, Options | Closed),
            Options => matches!(next, SkipOption { .. } | Request | Closed),
            SkipOption { .. } => matches!(next, SkipOption { .. } | Options),
            Request => matches!(next, Payload { .. } | SkipPayload { .. } | Closed),
            Payload { .. } => matches!(next, Request),
            SkipPayload { .. } => matches!(next, SkipPayload { .. } | Request),
            Closed => false,
        }
    }
}

/// Connection state, see the module documentation.
#[derive(Clone, Debug)]
pub struct Machine {
    handshake: Handshake,
    state: State,
    output: Vec<u8>,
}

impl Machine {
    /// Creates a new connection. The first output is the greeting.
    #[must_use]
    pub fn new(export: Export) -> Self {
        let mut output = Vec::with_capacity(18);
        output.extend(proto::NBD_MAGIC.to_be_bytes());
        output.extend(proto::OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        output.extend(flags.to_be_bytes());
        Self {
            handshake: Handshake::new(export),
            state: State::ClientFlags,
            output,
        }
    }

    fn become_state(&mut self, next: State) {
        become_state(&mut self.state, next);
    }

    /// Returns bytes which should be sent next, in order.
    pub fn poll_output(&mut self) -> Option<Vec<u8>> {
        (!self.output.is_empty()).then(|| std::mem::take(&mut self.output))
    }

    /// Returns whether read and status replies must use chunks.
    #[must_use]
    pub fn is_structured(&self) -> bool {
        self.handshake.structured
    }

    /// Returns whether the client will not send more data.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Number of payload bytes which are next in the stream.
    #[must_use]
    pub fn remaining_payload(&self) -> u32 {
        match self.state {
            State::Payload { left } => left,
            _ => 0,
        }
    }

    /// Must be called when the driver has received `len` payload bytes from the stream.
    ///
    /// # Panics
    /// If `len` exceeds [`Machine::remaining_payload`].
    pub fn handle_payload(&mut self, len: u32) {
        if len == 0 {
            return;
        }
        let State::Payload { left } = &mut self.state else {
            panic!("no payload is expected");
        };
        *left = left
            .checked_sub(len)
            .expect("more payload than the write has");
        if *left == 0 {
            self.become_state(State::Request);
        }
    }

    /// Processes one step of the received data, starting at the current stream position.
    ///
    /// It never requires more than an option header plus [`MAX_OPTION`] bytes at the same time. If
    /// write payload is next, it doesn't consume anything.
    ///
    /// # Errors
    /// Returns an error if the stream is invalid; the machine is then closed.
    pub fn handle(&mut self, input: &[u8]) -> Result<Progress, NbdFault> {
        let step = match self.state {
            State::ClientFlags => self.on_client_flags(input),
            State::Options => self.on_option(input),
            State::SkipOption { left } => {
                let n = (left as usize).min(input.len());
                self.become_state(match left - n as u32 {
                    0 => State::Options,
                    left => State::SkipOption { left },
                });
                Ok(Progress::took(n))
            }
            State::Request => self.on_request(input),
            State::Payload { .. } => Ok(Progress::took(0)),
            State::SkipPayload { left, reply } => Ok(self.on_skipped(input, left, reply)),
            State::Closed => Err(NbdFault::Closed),
        };
        if step.is_err() && !self.is_closed() {
            self.become_state(State::Closed);
        }
        step
    }

    fn on_client_flags(&mut self, input: &[u8]) -> Result<Progress, NbdFault> {
        let Some(flags) = input.first_chunk().map(|b| u32::from_be_bytes(*b)) else {
            return Ok(Progress::took(0));
        };
        let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        if flags & !known != 0 {
            return Err(NbdFault::ClientFlags(flags));
        }
        self.handshake.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        self.become_state(State::Options);
        Ok(Progress::took(4))
    }

    fn on_option(&mut self, input: &[u8]) -> Result<Progress, NbdFault> {
        let Some(header) = input.first_chunk::<OPTION_LEN>() else {
            return Ok(Progress::took(0));
        };
        let (magic, rest) = header.split_first_chunk::<8>().expect("16 bytes");
        let (option, len) = rest.split_first_chunk::<4>().expect("8 bytes");
        let magic = u64::from_be_bytes(*magic);
        let option = u32::from_be_bytes(*option);
        let len = u32::from_be_bytes(len.try_into().expect("4 bytes"));
        if magic != proto::OPTION_MAGIC {
            return Err(NbdFault::OptionMagic(magic));
        }
        if len as usize > MAX_OPTION {
            // EXPORT_NAME has no error reply.
            if len > MAX_SKIPPED_OPTION || option == opt::EXPORT_NAME {
                return Err(NbdFault::OptionLength { option, len });
            }
            handshake::reply(&mut self.output, option, proto::rep::ERR_TOO_BIG, &[]);
            self.become_state(State::SkipOption { left: len });
            return Ok(Progress::took(OPTION_LEN));
        }
        let Some(data) = input[OPTION_LEN..].get(..len as usize) else {
            return Ok(Progress::took(0));
        };
        let phase = self.handshake.on_option(&mut self.output, option, data)?;
        let event = match phase {
            Phase::Options => None,
            Phase::Transmission => {
                self.become_state(State::Request);
                None
            }
            Phase::Closed => {
                self.become_state(State::Closed);
                Some(Event::Disconnect)
            }
        };
        Ok(Progress {
            consumed: OPTION_LEN + data.len(),
            event,
        })
    }

    fn on_request(&mut self, input: &[u8]) -> Result<Progress, NbdFault> {
        let Some(header) = input.first_chunk::<REQUEST_LEN>() else {
            return Ok(Progress::took(0));
        };
        let mut event = None;
        match transmission::validate_request(header, &self.handshake)? {
            Verdict::Accept(request) => {
                if let Some(left) = request.payload() {
                    self.become_state(State::Payload { left });
                }
                event = Some(Event::Request(request));
            }
            Verdict::Disconnect => {
                self.become_state(State::Closed);
                event = Some(Event::Disconnect);
            }
            // If a write is rejected, we still need to skip its payload. This is done before
            // sending the reply, so we don't lose sync, even if the client sends the payload late.
            Verdict::Refuse {
                refusal,
                chunked,
                payload: 0,
            } => self.refuse(refusal, chunked),
            Verdict::Refuse {
                refusal, payload, ..
            } => {
                self.become_state(State::SkipPayload {
                    left: payload,
                    reply: refusal,
                });
            }
        }
        Ok(Progress {
            consumed: REQUEST_LEN,
            event,
        })
    }

    fn on_skipped(&mut self, input: &[u8], left: u32, reply: Refusal) -> Progress {
        let n = (left as usize).min(input.len());
        match left - n as u32 {
            0 => {
                self.become_state(State::Request);
                self.refuse(reply, false);
            }
            left => self.become_state(State::SkipPayload { left, reply }),
        }
        Progress::took(n)
    }

    fn refuse(&mut self, refusal: Refusal, chunked: bool) {
        if chunked {
            self.output.extend(proto::error_chunk(
                refusal.cookie,
                refusal.error,
                None,
                true,
            ));
        } else {
            self.output
                .extend(proto::simple_reply(refusal.cookie, Some(refusal.error)));
        }
    }
}

impl Progress {
    fn took(consumed: usize) -> Self {
        Self {
            consumed,
            event: None,
        }
    }
}

#[cfg(test)]
mod tests;
