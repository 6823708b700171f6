//! Verified load: reads, writes, sets to zero, swaps and flushes a few blocks, and checks the
//! results using a history.

use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use riser_block::task::block_on;
use riser_block::{BlockError, ZeroOptions};
use riser_initiator::engine::IoData;
use riser_initiator::lun::{Lun, LunError};
use riser_initiator::request::{Cdb, DataLen};
use riser_scsi::sense::{Sense, SenseKey};

use crate::history::{BLOCK, History, Port, Violation, WriteId};

/// Status of a command that was aborted by another initiator's task management request (SAM-5
/// 5.3.1).
const TASK_ABORTED: u8 = 0x40;

/// A generator of random numbers, which are the same in every run.
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

/// Returns a setting for a test, such as the seed or the size. It can be set by an environment
/// variable to reproduce a failure or for a long run.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |n| n.parse().expect("a number"))
}

/// Reason why an operation failed.
#[derive(Debug)]
pub struct Failed {
    /// Closest Linux error number.
    pub errno: i32,
    /// Set if there was a response from the target, so that the command has completed.
    pub has_response: bool,
    pub text: String,
}

/// Returns true if a command with this error can't have any effect later. After a unit attention,
/// or if it was aborted by another initiator, an earlier attempt could still be pending on the
/// disk.
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
            has_response: is_final(&error),
            text: error.to_string(),
            errno: BlockError::from(error).errno(),
        }
    }
}

/// Disk used by the load.
pub trait Disk: Send {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Failed>;
    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), Failed>;
    fn flush(&mut self) -> Result<(), Failed>;

    /// Sets blocks to zero, using a separate command if supported by the disk.
    fn zero(&mut self, offset: u64, len: usize, fua: bool) -> Result<(), Failed> {
        self.write(offset, &vec![0; len], fua)
    }

    /// Writes a block if it contains the expected data. This is never retried.
    fn swap(&mut self, _offset: u64, _expected: &[u8], _bytes: &[u8], _fua: bool) -> Swapped {
        unreachable!("only SCSI disks support swaps")
    }
}

/// Result of a COMPARE AND WRITE.
#[derive(Debug)]
pub enum Swapped {
    Done,
    /// The block contains different data.
    Differs,
    /// There was no response, or the result is not known.
    Unknown(Failed),
}

impl Disk for Lun {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Failed> {
        let buffer = block_on(self.buffers().take_buffer(bytes.len()));
        // Fill the buffer first, so that we can detect data not sent by the target.
        buffer.slice().fill(0, bytes.len(), 0xee);
        let buffer = block_on(Lun::read(self, offset, buffer))?;
        buffer.slice().read(0, bytes);
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), Failed> {
        let buffer = block_on(self.buffers().take_buffer(bytes.len()));
        buffer.slice().write(0, bytes);
        let buffer = block_on(Lun::write(self, offset, buffer, fua))?;
        // After this has returned, no data must be sent from this buffer.
        buffer.slice().fill(0, bytes.len(), 0xdd);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failed> {
        Ok(block_on(Lun::flush(self))?)
    }

    /// Uses WRITE SAME.
    fn zero(&mut self, offset: u64, len: usize, fua: bool) -> Result<(), Failed> {
        let range = offset..offset + len as u64;
        let options = ZeroOptions {
            fua,
            ..ZeroOptions::default()
        };
        Ok(block_on(Lun::write_zeroes(self, range, options))?)
    }

    /// Uses COMPARE AND WRITE.
    fn swap(&mut self, offset: u64, expected: &[u8], bytes: &[u8], fua: bool) -> Swapped {
        let buffer = block_on(self.buffers().take_buffer(2 * BLOCK));
        buffer.slice().write(0, expected);
        buffer.slice().write(BLOCK, bytes);
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[13]) = (0x89, u8::from(fua) << 3, 1);
        cdb[2..10].copy_from_slice(&(offset / BLOCK as u64).to_be_bytes());
        let cdb = Cdb::new(&cdb).expect("sixteen bytes");
        let len = DataLen::Out(2 * BLOCK as u32);
        let response = match block_on(self.scsi(cdb, len, IoData::One(buffer))).result {
            Ok(response) if response.status == 0 => return Swapped::Done,
            Ok(response) => response,
            Err(error) => {
                return Swapped::Unknown(Failed {
                    errno: 0,
                    has_response: false,
                    text: error.to_string(),
                });
            }
        };
        let error = match response.sense() {
            Some(sense) if sense.key == SenseKey::Miscompare => return Swapped::Differs,
            Some(Sense {
                key, additional, ..
            }) => LunError::Check { key, additional },
            None => LunError::Status(response.status),
        };
        Swapped::Unknown(error.into())
    }
}

/// A client for an NBD export that sends one request at a time and uses simple replies.
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
        // Fixed newstyle without zeroes; NBD_OPT_EXPORT_NAME for the default export.
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
                has_response: false,
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

    fn zero(&mut self, offset: u64, len: usize, fua: bool) -> Result<(), Failed> {
        const NO_HOLE: u16 = 2;
        let flags = u16::from(fua) | NO_HOLE;
        self.request(flags, 6, (offset, len as u32), &[]);
        self.reply()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    Zero,
    /// COMPARE AND WRITE of a block, using the data that was read immediately before.
    Swap,
}

impl Kind {
    /// Operations supported by any disk. There are enough writes of zeroes so that other writes
    /// will overlap them.
    pub const OF_DISKS: &'static [Self] = &[
        Self::Read,
        Self::Read,
        Self::Read,
        Self::Write,
        Self::Write,
        Self::Write,
        Self::Zero,
        Self::Flush,
    ];

    /// Operations supported by a SCSI disk.
    pub const OF_SCSI: &'static [Self] = &[
        Self::Read,
        Self::Read,
        Self::Read,
        Self::Write,
        Self::Write,
        Self::Write,
        Self::Zero,
        Self::Swap,
        Self::Swap,
        Self::Flush,
    ];
}

/// An operation of the load.
#[derive(Clone, Debug)]
pub struct Op {
    pub kind: Kind,
    /// Used by all operations except flush.
    pub blocks: Range<u64>,
    fua: bool,
}

impl Op {
    /// Creates a random operation in this range. Reads and writes have the same probability, and
    /// flushes are rare.
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

    /// Creates a random operation in this range, using one of the given kinds.
    pub fn of_kinds(
        kinds: &[Kind],
        chance: &mut Chance,
        within: &Range<u64>,
        longest: u64,
    ) -> Self {
        let kind = kinds[chance.below(kinds.len() as u64) as usize];
        let longest = if kind == Kind::Swap { 1 } else { longest };
        let op = Self::random(chance, within, longest);
        Self { kind, ..op }
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

    /// Executes this operation.
    ///
    /// # Panics
    /// Panics if the history returns an error.
    pub fn carry_out(
        &self,
        disk: &mut dyn Disk,
        port: Port,
        history: &History,
    ) -> Result<(), Failed> {
        let len = (self.blocks.end - self.blocks.start) as usize * BLOCK;
        let offset = self.blocks.start * BLOCK as u64;
        let mut bytes = vec![0; len];
        match self.kind {
            Kind::Flush => disk.flush(),
            Kind::Read => self.read_into(disk, port, history, &mut bytes),
            Kind::Write => {
                let id = history.begin_write(port, self.blocks.clone(), &mut bytes);
                let result = disk.write(offset, &bytes, self.fua);
                self.end_write(port, history, id, result)
            }
            Kind::Zero => {
                let id = history.begin_zero(port, self.blocks.clone());
                let result = disk.zero(offset, len, self.fua);
                self.end_write(port, history, id, result)
            }
            Kind::Swap => {
                self.read_into(disk, port, history, &mut bytes)?;
                let expected = bytes.clone();
                let id = history.begin_swap(port, self.blocks.start, &mut bytes);
                match disk.swap(offset, &expected, &bytes, self.fua) {
                    Swapped::Done => {
                        let result = history.acknowledge_swap(id, &expected, false);
                        self.check_result(port, result);
                    }
                    Swapped::Differs => self.check_result(port, history.refute(id)),
                    Swapped::Unknown(error) if error.has_response => {
                        history.refuse(id);
                        return Err(error);
                    }
                    // A raw command must be retried by the user, so if there is a unit attention or
                    // if the connection is closed, this is not an error.
                    Swapped::Unknown(_) => history.lose(id),
                }
                Ok(())
            }
        }
    }

    fn read_into(
        &self,
        disk: &mut dyn Disk,
        port: Port,
        history: &History,
        bytes: &mut [u8],
    ) -> Result<(), Failed> {
        let id = history.begin_read(port, self.blocks.clone());
        match disk.read(self.blocks.start * BLOCK as u64, bytes) {
            Ok(()) => {
                self.check_result(port, history.end_read(id, bytes));
                Ok(())
            }
            Err(error) => {
                history.abandon_read(id);
                Err(error)
            }
        }
    }

    fn end_write(
        &self,
        port: Port,
        history: &History,
        id: WriteId,
        result: Result<(), Failed>,
    ) -> Result<(), Failed> {
        match &result {
            Ok(()) => self.check_result(port, history.acknowledge(id)),
            Err(error) if error.has_response => history.refuse(id),
            Err(_) => history.lose(id),
        }
        result
    }

    fn check_result(&self, port: Port, result: Result<(), Violation>) {
        if let Err(violation) = result {
            panic!("{self:?} of port {}: {violation}", port.0);
        }
    }
}
