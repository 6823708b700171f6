//! Verified load: reads, writes and flushes of a few blocks, judged by a history.

use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::history::{BLOCK, History, Port};
use riser_initiator::block::BlockError;
use riser_initiator::block::task::block_on;
use riser_initiator::lun::{Lun, LunError};
use riser_scsi::sense::SenseKey;

/// The status of a command that another initiator's task management has ended (SAM-5 5.3.1).
const TASK_ABORTED: u8 = 0x40;

/// A generator of numbers that are the same in every run.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64, stream: u64) -> Self {
        let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream << 32;
        Self(mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1)
    }

    pub fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % most
    }

    pub fn between(&mut self, from: Duration, to: Duration) -> Duration {
        from + Duration::from_micros(self.below((to - from).as_micros() as u64 + 1))
    }
}

/// The seed of a test, and how long it takes: a variable sets each, for replays and long runs.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |n| n.parse().expect("a number"))
}

/// Why an operation failed.
#[derive(Debug)]
pub struct Failed {
    /// The Linux error number that says it best.
    pub errno: i32,
    /// The target has answered, so the command is over.
    pub is_answered: bool,
    pub text: String,
}

/// Whether a command that ended so can have no effect any more. After a unit attention, or where
/// another initiator has aborted it, an attempt before the last one may still be at the disk.
fn is_final(error: &LunError) -> bool {
    match error {
        LunError::Check { key, .. } => {
            !matches!(key, SenseKey::UnitAttention | SenseKey::AbortedCommand)
        }
        LunError::Status(status) => *status != TASK_ABORTED,
        _ => false,
    }
}

impl From<LunError> for Failed {
    fn from(error: LunError) -> Self {
        Self {
            is_answered: is_final(&error),
            text: error.to_string(),
            errno: BlockError::from(error).errno(),
        }
    }
}

/// What the load works on.
pub trait Disk: Send {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Failed>;
    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), Failed>;
    fn flush(&mut self) -> Result<(), Failed>;
}

impl Disk for Lun {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Failed> {
        let buffer = block_on(self.buffers().take(bytes.len()));
        // What the target does not send is not taken for an answer.
        buffer.slice().fill(0, bytes.len(), 0xee);
        let buffer = block_on(Lun::read(self, offset, buffer))?;
        buffer.slice().read(0, bytes);
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), Failed> {
        let buffer = block_on(self.buffers().take(bytes.len()));
        buffer.slice().write(0, bytes);
        let buffer = block_on(Lun::write(self, offset, buffer, fua))?;
        // Nothing may leave a buffer that its owner has again.
        buffer.slice().fill(0, bytes.len(), 0xdd);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failed> {
        Ok(block_on(Lun::flush(self))?)
    }
}

/// A client of an NBD export, with one request at a time and simple replies.
pub struct Nbd {
    socket: UnixStream,
    cookie: u64,
}

impl Nbd {
    pub fn connect(path: &Path) -> Self {
        let mut socket = UnixStream::connect(path).unwrap();
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle without zeroes; NBD_OPT_EXPORT_NAME of the default export.
        socket
            .write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0")
            .unwrap();
        socket.read_exact(&mut [0; 10]).unwrap();
        Self { socket, cookie: 0 }
    }

    fn request(&mut self, flags: u16, kind: u16, place: (u64, u32), data: &[u8]) {
        self.cookie += 1;
        let mut bytes = Vec::with_capacity(28 + data.len());
        bytes.extend(0x2560_9513u32.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(place.0.to_be_bytes());
        bytes.extend(place.1.to_be_bytes());
        bytes.extend(data);
        self.socket.write_all(&bytes).unwrap();
    }

    fn reply(&mut self) -> Result<(), Failed> {
        let mut reply = [0; 16];
        self.socket.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        assert_eq!(reply[8..], self.cookie.to_be_bytes());
        match i32::from_be_bytes(reply[4..8].try_into().unwrap()) {
            0 => Ok(()),
            errno => Err(Failed {
                errno,
                is_answered: false,
                text: format!("NBD error {errno}"),
            }),
        }
    }
}

impl Disk for Nbd {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Failed> {
        self.request(0, 0, (offset, bytes.len() as u32), &[]);
        self.reply()?;
        self.socket.read_exact(bytes).unwrap();
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), Failed> {
        let place = (offset, bytes.len() as u32);
        self.request(u16::from(fua), 1, place, bytes);
        self.reply()
    }

    fn flush(&mut self) -> Result<(), Failed> {
        self.request(0, 3, (0, 0), &[]);
        self.reply()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
}

/// An operation of the load.
#[derive(Clone, Debug)]
pub struct Op {
    pub kind: Kind,
    /// Of a read or write.
    pub blocks: Range<u64>,
    fua: bool,
}

impl Op {
    /// Reads and writes as often, and seldom a flush, within these blocks.
    pub fn random(chance: &mut Chance, within: &Range<u64>, longest: u64) -> Self {
        let kind = match chance.below(17) {
            0 => Kind::Flush,
            n if n % 2 == 0 => Kind::Read,
            _ => Kind::Write,
        };
        let len = 1 + chance.below(longest.min(within.end - within.start));
        let start = within.start + chance.below(within.end - within.start - len + 1);
        Self {
            kind,
            blocks: start..start + len,
            fua: chance.below(4) == 0,
        }
    }

    pub fn read(blocks: Range<u64>) -> Self {
        Self {
            kind: Kind::Read,
            blocks,
            fua: false,
        }
    }

    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.blocks.start < range.end && range.start < self.blocks.end
    }

    /// Carries it out.
    ///
    /// # Panics
    /// If the history has a fault to find with how it ended.
    pub fn carry_out(
        &self,
        disk: &mut dyn Disk,
        port: Port,
        history: &History,
    ) -> Result<(), Failed> {
        let len = (self.blocks.end - self.blocks.start) as usize * BLOCK;
        let offset = self.blocks.start * BLOCK as u64;
        let mut bytes = vec![0; len];
        let judge = |result| match result {
            Ok(()) => {}
            Err(violation) => panic!("{self:?} of port {}: {violation}", port.0),
        };
        match self.kind {
            Kind::Flush => disk.flush(),
            Kind::Read => {
                let id = history.begin_read(port, self.blocks.clone());
                match disk.read(offset, &mut bytes) {
                    Ok(()) => judge(history.end_read(id, &bytes)),
                    Err(error) => {
                        history.abandon_read(id);
                        return Err(error);
                    }
                }
                Ok(())
            }
            Kind::Write => {
                let id = history.begin_write(port, self.blocks.clone(), &mut bytes);
                match disk.write(offset, &bytes, self.fua) {
                    Ok(()) => judge(history.acknowledge(id)),
                    Err(error) => {
                        match error.is_answered {
                            true => history.refuse(id),
                            false => history.lose(id),
                        }
                        return Err(error);
                    }
                }
                Ok(())
            }
        }
    }
}
