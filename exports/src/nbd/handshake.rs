//! Option negotiation.

use super::Export;
use super::cursor::Cursor;
use super::fault::NbdFault;
use super::proto::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, MAX_REQUEST, OPTION_REPLY_MAGIC, info, opt, rep,
};

/// Appends an option reply.
pub(super) fn reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Phase after processing an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client can send more options.
    Options,
    /// Transmission phase; the client can send requests.
    Transmission,
    /// The client has aborted the negotiation.
    Closed,
}

/// Negotiated state.
#[derive(Clone, Debug)]
pub(super) struct Handshake {
    pub(super) export: Export,
    /// Don't send padding with the `EXPORT_NAME` reply.
    pub(super) no_zeroes: bool,
    pub(super) structured: bool,
    /// Set if the context `base:allocation` has been selected.
    pub(super) base_allocation: bool,
}

impl Handshake {
    pub(super) fn new(export: Export) -> Self {
        Self {
            export,
            no_zeroes: false,
            structured: false,
            base_allocation: false,
        }
    }

    /// Handles a complete option.
    pub(super) fn on_option(
        &mut self,
        out: &mut Vec<u8>,
        option: u32,
        data: &[u8],
    ) -> Result<Phase, NbdFault> {
        let result = match option {
            // This is the only option with no option reply, neither for success nor for failure.
            opt::EXPORT_NAME => {
                self.on_export_name(out, data)?;
                return Ok(Phase::Transmission);
            }
            opt::ABORT => Ok(()),
            opt::LIST => self.on_list(out, data),
            opt::INFO | opt::GO => self.on_info(out, option, data),
            opt::STRUCTURED_REPLY => self.on_structured_reply(data),
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                self.on_meta_context(out, option, data)
            }
            _ => Err(rep::ERR_UNSUP),
        };
        reply(out, option, result.err().unwrap_or(rep::ACK), &[]);
        Ok(match (option, result) {
            (opt::ABORT, _) => Phase::Closed,
            (opt::GO, Ok(())) => Phase::Transmission,
            _ => Phase::Options,
        })
    }

    fn on_export_name(&self, out: &mut Vec<u8>, name: &[u8]) -> Result<(), NbdFault> {
        if !self.export.is_named(name) {
            return Err(NbdFault::UnknownExport);
        }
        let flags = self.export.transmission_flags(self.structured);
        out.extend(self.export.size.to_be_bytes());
        out.extend(flags.to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        Ok(())
    }

    fn on_list(&self, out: &mut Vec<u8>, data: &[u8]) -> Result<(), u32> {
        if !data.is_empty() {
            return Err(rep::ERR_INVALID);
        }
        let name = self.export.name.as_bytes();
        let mut body = (name.len() as u32).to_be_bytes().to_vec();
        body.extend(name);
        body.extend(self.export.description.as_bytes());
        reply(out, opt::LIST, rep::SERVER, &body);
        Ok(())
    }

    fn on_info(&self, out: &mut Vec<u8>, option: u32, data: &[u8]) -> Result<(), u32> {
        let parse = || {
            let mut cursor = Cursor(data);
            let name = cursor.string()?;
            let count = usize::from(cursor.u16()?);
            let wanted = cursor.bytes(count * 2)?;
            cursor.finish()?;
            Some((name, wanted))
        };
        let (name, wanted) = parse().ok_or(rep::ERR_INVALID)?;
        if !self.export.is_named(name) {
            return Err(rep::ERR_UNKNOWN);
        }
        let (kinds, _) = wanted.as_chunks::<2>();
        let wants = |kind: u16| kinds.iter().any(|k| u16::from_be_bytes(*k) == kind);
        let Export {
            name,
            description,
            size,
            preferred_block,
            ..
        } = &self.export;
        let mut send = |kind: u16, rest: &[&[u8]]| {
            let mut body = kind.to_be_bytes().to_vec();
            rest.iter().for_each(|part| body.extend(*part));
            reply(out, option, rep::INFO, &body);
        };
        let flags = self.export.transmission_flags(self.structured);
        // INFO_EXPORT must always be sent, other info only if it was requested.
        send(info::EXPORT, &[&size.to_be_bytes(), &flags.to_be_bytes()]);
        if wants(info::NAME) {
            send(info::NAME, &[name.as_bytes()]);
        }
        if wants(info::DESCRIPTION) && !description.is_empty() {
            send(info::DESCRIPTION, &[description.as_bytes()]);
        }
        if wants(info::BLOCK_SIZE) {
            send(
                info::BLOCK_SIZE,
                &[
                    &1u32.to_be_bytes(),
                    &preferred_block.to_be_bytes(),
                    &MAX_REQUEST.to_be_bytes(),
                ],
            );
        }
        Ok(())
    }

    fn on_structured_reply(&mut self, data: &[u8]) -> Result<(), u32> {
        if !data.is_empty() {
            return Err(rep::ERR_INVALID);
        }
        self.structured = true;
        Ok(())
    }

    fn on_meta_context(&mut self, out: &mut Vec<u8>, option: u32, data: &[u8]) -> Result<(), u32> {
        let set = option == opt::SET_META_CONTEXT;
        if set {
            // The new selection replaces the previous one, even if it fails.
            self.base_allocation = false;
        }
        let parse = || {
            let mut cursor = Cursor(data);
            let name = cursor.string()?;
            let count = cursor.u32()?;
            let mut matches = !set && count == 0;
            for _ in 0..count {
                let query = cursor.string()?;
                matches |= query == BASE_ALLOCATION.as_bytes() || (!set && query == b"base:");
            }
            cursor.finish()?;
            Some((name, matches))
        };
        let (name, matches) = parse().ok_or(rep::ERR_INVALID)?;
        if !self.structured {
            return Err(rep::ERR_INVALID);
        }
        if !self.export.is_named(name) {
            return Err(rep::ERR_UNKNOWN);
        }
        if matches {
            let id = if set { BASE_ALLOCATION_ID } else { 0 };
            let mut body = id.to_be_bytes().to_vec();
            body.extend(BASE_ALLOCATION.as_bytes());
            reply(out, option, rep::META_CONTEXT, &body);
            self.base_allocation |= set;
        }
        Ok(())
    }
}
