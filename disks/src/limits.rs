//! Limits supported by a disk: [`Limits`].

use std::ops::Range;

use riser_block::{BlockError, Buffer, Command, CommandKind, Geometry};

/// Limits for disk operations.
#[derive(Debug)]
pub(super) struct Limits {
    pub(super) geometry: Geometry,
    /// Writes can use FUA. If not set, we send a flush after the write instead.
    pub(super) has_fua: bool,
}

/// How to execute an operation.
#[derive(Debug)]
pub(super) struct Plan {
    /// `None` if there is nothing to do.
    pub(super) command: Option<Command>,
    pub(super) buffer: Option<Buffer>,
    /// A flush is required after this command.
    pub(super) then_flush: bool,
}

impl Limits {
    /// Returns the commands to execute for an operation.
    ///
    /// # Errors
    /// Returns an error if it exceeds the limits; the buffer will be dropped.
    pub(super) fn plan(&self, operation: riser_block::Operation) -> Result<Plan, BlockError> {
        let only = |command| Plan {
            command,
            buffer: None,
            then_flush: false,
        };
        Ok(match operation {
            riser_block::Operation::Read { offset, buffer } => {
                self.check_transfer(offset, buffer.len())?;
                let command = Command::new(CommandKind::Read, offset, buffer.len() as u64);
                Plan {
                    command: (!buffer.is_empty()).then_some(command),
                    buffer: Some(buffer),
                    then_flush: false,
                }
            }
            riser_block::Operation::Write {
                offset,
                buffer,
                fua,
            } => {
                if self.geometry.read_only {
                    return Err(BlockError::ReadOnly);
                }
                self.check_transfer(offset, buffer.len())?;
                let command = Command {
                    fua: fua && self.has_fua,
                    ..Command::new(CommandKind::Write, offset, buffer.len() as u64)
                };
                let is_cached = !buffer.is_empty() && self.geometry.volatile_cache;
                Plan {
                    command: (!buffer.is_empty()).then_some(command),
                    buffer: Some(buffer),
                    then_flush: fua && !self.has_fua && is_cached,
                }
            }
            riser_block::Operation::Flush => {
                let command = Command::new(CommandKind::Flush, 0, 0);
                only(self.geometry.volatile_cache.then_some(command))
            }
            riser_block::Operation::Discard(range) => {
                self.check_change(&range, self.geometry.max_discard)?;
                let kind = CommandKind::Discard { zeroes: false };
                let command = Command::new(kind, range.start, range.end - range.start);
                only((!range.is_empty()).then_some(command))
            }
        })
    }

    /// Returns an error if the range isn't aligned to blocks or not within the disk.
    pub(super) fn check(&self, range: &Range<u64>) -> Result<(), BlockError> {
        let block = u64::from(self.geometry.block_size);
        let is_aligned = range.start.is_multiple_of(block) && range.end.is_multiple_of(block);
        let len = range.end.checked_sub(range.start);
        match len {
            Some(len) if is_aligned && self.geometry.contains(range.start, len) => Ok(()),
            _ => Err(BlockError::OutOfRange),
        }
    }

    fn check_transfer(&self, offset: u64, len: usize) -> Result<(), BlockError> {
        if len > self.geometry.max_transfer as usize {
            return Err(BlockError::OutOfRange);
        }
        let end = offset.checked_add(len as u64);
        self.check(&(offset..end.ok_or(BlockError::OutOfRange)?))
    }

    /// Returns an error if the range can't be modified or if it exceeds `most` bytes.
    pub(super) fn check_change(&self, range: &Range<u64>, most: u64) -> Result<(), BlockError> {
        if self.geometry.read_only {
            return Err(BlockError::ReadOnly);
        }
        if most == 0 {
            return Err(BlockError::Unsupported);
        }
        self.check(range)?;
        match range.end - range.start <= most {
            true => Ok(()),
            false => Err(BlockError::OutOfRange),
        }
    }
}
