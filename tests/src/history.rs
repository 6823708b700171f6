//! A checker for the data returned by a disk, based on a version for each block.
//!
//! Each 512-byte block written in a test contains the number of the write ([`Version`]) and the
//! block number, which are encoded in all of its bytes. A [`History`] must be notified when any
//! read or write is started and completed. It then checks if there is an order of writes for each
//! block that is consistent with the data returned by all reads.
//!
//! # Guarantees
//!
//! - A block is atomic: all of its data is from the same write. If writes with several blocks
//!   overlap and are concurrent, their data may be mixed, but only at block boundaries (SBC-4
//!   clause 4.29 guarantees less than this).
//! - A write takes effect at a single point in time between its start and its completion. This
//!   means that a read must return either the last acknowledged write or any write that is
//!   concurrent with this write or with the read.
//! - Data that was overwritten must never be returned again: not after a new login, not after a
//!   reset, and not to any other reader.
//!
//! # Unacknowledged writes
//!
//! | result of a write | has it been applied? | could be applied until |
//! | --- | --- | --- |
//! | [`acknowledge`](History::acknowledge) | yes | the acknowledgement |
//! | [`refuse`](History::refuse): the target returned an error | possibly, separately for each block | the response, because the command has completed (SAM-5 clause 5.4) |
//! | [`lose`](History::lose): timeout, connection lost | possibly | the next fence of its initiator port |
//!
//! A *fence* is the completion of any command from the same initiator port that was started after
//! the loss: a command can't overtake an earlier command that timed out (`RequestError::TimedOut`),
//! and if a login replaces a session, it must not be accepted before all commands of the old
//! session have completed. If there are several paths ([`History::with_paths`]), this is only true
//! for commands that use the same block, because only these commands have to wait for a lost path.
//! The checker can detect a fence because we pass the port number for each read and write.
//!
//! # Retried writes
//!
//! If an initiator loses its session, or if its commands are aborted, it will retry any writes that
//! have no response. So a write can be applied several times until it completes, with other writes
//! in between, and the target is not able to detect this. [`History::with_repeats`] allows this
//! behavior: an acknowledged write must then have been applied at least once between its start and
//! its completion, but never after this.
//!
//! # Power failures
//!
//! [`History::with_power_cuts`] allows the use of [`power_cut`](History::power_cut), which can lose
//! any data in a volatile cache, separately for each block (see `history/durability.rs` for the
//! rules). A write is *durable* if it was [acknowledged as durable](History::acknowledge_durable),
//! or if a [flush](History::end_flush) was started after its acknowledgement and has returned GOOD.
//! After a power failure, each block contains a single version, which can be any version unless a
//! durable version was started after it completed. So if a block was not flushed, it must contain
//! the last durable version or any version written since, but no other data.
//!
//! # Torn blocks
//!
//! A disk with protection information does not write blocks atomically. After a crash, a block can
//! therefore contain parts of several versions if one of its writes was not durable
//! ([`tear`](History::tear)). A read can return this data until the block is written again.
//!
//! # Zeroes
//!
//! If a block is set to zero or unmapped ([`begin_zero`](History::begin_zero)), it can't contain a
//! version. If a read returns zeroes, we assume that this is the only write of zeroes. If there are
//! several, it's enough if the data could be from any of them.
//!
//! # Compare and swap
//!
//! If a COMPARE AND WRITE ([`begin_swap`](History::begin_swap)) was successful
//! ([`acknowledge_swap`](History::acknowledge_swap)), the block must have contained the expected
//! data, and there must be no other successful command that expected the same version. If the
//! comparison failed ([`refute`](History::refute)), no data was written.
//!
//! # Algorithm
//!
//! Versions are unique, so a block is a register and we know the version returned by each read. The
//! *zone* of a version includes all of its operations, and is defined by the first completion and
//! the last start of any of them. If the completion is before the start (forward), the block must
//! have contained this version for the whole zone. Otherwise (backward), it must have contained
//! this version at some point in the zone. A valid order exists if and only if no two forward zones
//! overlap and no backward zone is inside a forward zone (Gibbons and Korach, "Testing Shared
//! Memories", 1997, section 4). If a write can be retried, it's handled as several writes: one for
//! each read that was started before the write completed, and one for all later reads. Time is
//! measured as the order of notifications.

mod durability;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use durability::Durability;
pub use durability::FlushId;

/// Block size in bytes.
pub const BLOCK: usize = 512;

/// Initiator port that sent a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(pub u16);

impl Port {
    /// Set in the port number if its data should be marked.
    const MARKED: u16 = 0x8000;

    /// Prefix of all marks, followed by the port number.
    pub const MARK: [u8; 4] = [0xb1, 0x0c, 0x5e, 0xa7];

    /// Creates a port that marks its data, so that we can find any part of it later: all words of a
    /// block except for the first two start with [`Self::MARK`] and the port number.
    #[must_use]
    pub const fn marked(number: u16) -> Self {
        Self(number | Self::MARKED)
    }

    fn is_marked(self) -> bool {
        self.0 & Self::MARKED != 0
    }
}

/// Identifies the write that was used to create the data in a block. Zeroes have version 0 of port
/// 0, which is never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Sequence number in the order that writes were started, beginning with 1.
    pub sequence: u64,
    /// Port that sent this write.
    pub writer: Port,
}

impl Version {
    const NONE: Self = Self {
        sequence: 0,
        writer: Port(0),
    };

    /// Returns the words of a block, which depend on both the version and the block number.
    fn words(self, block: u64) -> impl Iterator<Item = u64> {
        let names = [block, self.sequence << 16 | u64::from(self.writer.0)];
        let mark = u64::from(u32::from_be_bytes(Port::MARK)) << 32 | u64::from(self.writer.0) << 16;
        let mix = move |n: u64| {
            let mut word = names[0].rotate_left(32) ^ names[1] ^ n << 56;
            word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            let word = word ^ word >> 31;
            match self.writer.is_marked() {
                true => mark | word & 0xffff,
                false => word,
            }
        };
        names.into_iter().chain((2..64).map(mix))
    }

    /// Creates a version for a write. Sequence numbers start at 1.
    #[must_use]
    pub const fn new(sequence: u64, writer: Port) -> Self {
        Self { sequence, writer }
    }

    /// Fills a block with data.
    pub fn fill(self, block: u64, bytes: &mut [u8]) {
        for (word, bytes) in self.words(block).zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
    }

    /// Parses the version in a block. Returns `None` if the data is not consistent or belongs to
    /// another block.
    #[must_use]
    pub fn of(block: u64, bytes: &[u8]) -> Option<Self> {
        if bytes.iter().all(|b| *b == 0) {
            return Some(Self::NONE);
        }
        let named = u64::from_be_bytes(bytes[8..16].try_into().ok()?);
        let version = Self {
            sequence: named >> 16,
            writer: Port(named as u16),
        };
        let mut words = version.words(block).zip(bytes.chunks_exact(8));
        let is_whole = words.all(|(word, bytes)| bytes == word.to_be_bytes());
        is_whole.then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NONE => f.write_str("nothing"),
            Self { sequence, writer } => write!(f, "write {sequence} of port {}", writer.0),
        }
    }
}

/// An error found by the checker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A block contains data from several writes, data for another block, or data that was never
    /// written.
    Torn {
        /// Block number.
        block: u64,
        /// Offset of the first byte that is different from the expected value.
        byte: usize,
        /// Version found at the start of the block.
        said: Version,
        /// Word that contains this byte.
        found: u64,
    },
    /// A block contains a version that was already overwritten or was never written to this block.
    Stale {
        /// Block number.
        block: u64,
        /// Version returned by the read.
        seen: Version,
    },
    /// The order of two versions is not possible, because each must be before the other.
    Disorder {
        /// Block number.
        block: u64,
        /// The two versions.
        versions: [Version; 2],
        /// The zone of each version.
        zones: [(u64, u64); 2],
    },
    /// A write was acknowledged and flushed before a power failure, but the block contains an older
    /// version.
    Lost {
        /// Block number.
        block: u64,
        /// Version that was lost.
        version: Version,
        /// Version returned by the read.
        seen: Version,
    },
    /// A read has returned data from a write that was never applied, because its comparison failed.
    Refuted {
        /// Block number.
        block: u64,
        /// Version of this write.
        version: Version,
    },
    /// Two comparisons were successful with the same version, but it was only written once.
    SwappedTwice {
        /// Block number.
        block: u64,
        /// Version replaced by both writes.
        version: Version,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Torn {
                block,
                byte,
                said,
                found,
            } => write!(
                f,
                "block {block} is not whole: it begins as {said}, and differs from byte {byte} on, \
                 where it has {found:016x}"
            ),
            Self::Stale { block, seen } => {
                write!(
                    f,
                    "block {block} holds {seen}, which was overwritten or never written"
                )
            }
            Self::Lost {
                block,
                version,
                seen,
            } => write!(
                f,
                "block {block} lost {version}, which was durable, with the power, and held {seen}"
            ),
            Self::Refuted { block, version } => {
                write!(f, "block {block} holds {version}, whose comparison failed")
            }
            Self::SwappedTwice { block, version } => write!(
                f,
                "block {block}: two comparisons with {version}, written once, let a write through"
            ),
            Self::Disorder {
                block,
                versions: [one, two],
                zones,
            } => write!(
                f,
                "block {block}: no order of {one} and {two} explains what was read and \
                 acknowledged at {zones:?}"
            ),
        }
    }
}

/// ID of a write that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriteId(u64);

/// ID of a read that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadId(u64);

/// A version of a single block.
#[derive(Clone, Debug)]
struct Entry {
    version: Version,
    /// Set for zeroes, which don't contain a version.
    is_zero: bool,
    /// Start time of the write.
    begin: u64,
    /// Latest time at which the write can be applied, or `u64::MAX` if it's not known yet.
    end: u64,
    /// Set if the write must have been applied, because it was acknowledged or returned by a read.
    is_certain: bool,
    /// Completion time of the first operation.
    first_end: u64,
    /// Start time of the last operation.
    last_begin: u64,
    /// Zones for single reads of a write that can be retried. These are always backward.
    glimpses: Vec<(u64, u64)>,
    /// Time of the acknowledgement, if any.
    acknowledged: Option<u64>,
    /// Set if this version can't be lost in a power failure, unless there is a newer version.
    is_durable: bool,
    /// Zone of this version before the first power failure after its completion.
    origin: Option<(u64, u64)>,
    /// Set if a comparison with this version was successful.
    is_swapped: bool,
}

impl Entry {
    fn new(version: Version, is_zero: bool, begin: u64) -> Self {
        Self {
            version,
            is_zero,
            begin,
            end: u64::MAX,
            is_certain: false,
            first_end: u64::MAX,
            last_begin: begin,
            glimpses: Vec::new(),
            acknowledged: None,
            is_durable: false,
            origin: None,
            is_swapped: false,
        }
    }

    fn zone(&self) -> (u64, u64) {
        let (a, b) = (self.first_end, self.last_begin);
        (a.min(b), a.max(b))
    }

    /// Returns true if the block must have contained this version for the whole zone.
    fn is_forward(&self) -> bool {
        self.first_end < self.last_begin
    }

    fn conflicts(&self, other: &Self) -> bool {
        if !self.is_certain || !other.is_certain || self.version == other.version {
            return false;
        }
        let ((a, b), (c, d)) = (self.zone(), other.zone());
        if self.is_forward() && other.is_forward() {
            return a < d && c < b;
        }
        self.encloses(other) || other.encloses(self)
    }

    /// Returns true if the block contained this version during the whole time in which it must have
    /// contained the other version.
    fn encloses(&self, other: &Self) -> bool {
        let (a, b) = self.zone();
        let whole = (!other.is_forward()).then_some(other.zone());
        let mut zones = whole.into_iter().chain(other.glimpses.iter().copied());
        self.is_forward() && zones.any(|(c, d)| a < c && d < b)
    }

    /// Handles a read that has returned this version.
    fn on_read(&mut self, begin: u64, end: u64, repeats: bool) {
        self.is_certain = true;
        if repeats && begin < self.end {
            self.glimpses
                .push((begin.max(self.begin), end.min(self.end)));
            return;
        }
        self.first_end = self.first_end.min(end);
        self.last_begin = self.last_begin.max(begin);
    }
}

#[derive(Debug)]
struct Write {
    version: Version,
    begin: u64,
    /// Number of power failures before this was started.
    cuts: usize,
    blocks: Range<u64>,
    /// Set if this also reads the block.
    is_swap: bool,
    /// Time when this write was lost, if any.
    lost: Option<u64>,
}

#[derive(Clone, Debug)]
struct Read {
    port: Port,
    begin: u64,
    /// Number of power failures before this was started.
    cuts: usize,
    blocks: Range<u64>,
}

#[derive(Debug)]
struct State {
    clock: u64,
    sequence: u64,
    /// Set if writes can be retried until they complete.
    repeats: bool,
    /// Set if a fence only affects writes to the same block.
    by_block: bool,
    blocks: Vec<Vec<Entry>>,
    /// Writes that could still be applied.
    writes: HashMap<WriteId, Write>,
    reads: BTreeMap<ReadId, Read>,
    /// Number of successful COMPARE AND WRITE commands.
    swapped: u64,
    durability: Durability,
    /// Blocks with parts of several versions.
    torn: HashMap<u64, Tear>,
}

/// Content of a torn block.
#[derive(Debug)]
struct Tear {
    bytes: Vec<u8>,
    begin: u64,
    /// Time when the block was written again, or `u64::MAX`.
    end: u64,
}

/// All reads and writes on a disk. See the module documentation.
#[derive(Debug)]
pub struct History(Mutex<State>);

impl History {
    /// Creates the history for a disk of `blocks` blocks, which must all be zero.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let nothing = Entry {
            end: 0,
            is_certain: true,
            first_end: 0,
            is_durable: true,
            ..Entry::new(Version::NONE, true, 0)
        };
        Self(Mutex::new(State {
            clock: 0,
            sequence: 0,
            repeats: false,
            by_block: false,
            blocks: vec![vec![nothing]; blocks],
            writes: HashMap::new(),
            reads: BTreeMap::new(),
            swapped: 0,
            durability: Durability::default(),
            torn: HashMap::new(),
        }))
    }

    /// Allows initiators to retry a write until it completes.
    #[must_use]
    pub fn with_repeats(self) -> Self {
        self.lock().repeats = true;
        self
    }

    /// Allows initiators to use several paths to the disk.
    #[must_use]
    pub fn with_paths(self) -> Self {
        self.lock().by_block = true;
        self
    }

    /// Ignore a panic in another test thread, because the state is still valid.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Must be called before a write is sent. The data to write is copied to `bytes`.
    ///
    /// # Panics
    /// Panics if the blocks are out of range, or if `bytes` doesn't have the correct length.
    pub fn begin_write(&self, port: Port, blocks: Range<u64>, bytes: &mut [u8]) -> WriteId {
        assert_eq!(
            bytes.len() as u64,
            (blocks.end - blocks.start) * BLOCK as u64
        );
        let mut state = self.lock();
        let id = state.begin_write(port, blocks.clone(), false);
        let version = state.writes[&id].version;
        for (block, bytes) in blocks.zip(bytes.chunks_exact_mut(BLOCK)) {
            version.fill(block, bytes);
        }
        id
    }

    /// Must be called before a COMPARE AND WRITE is sent. The data to write is copied to `bytes`.
    ///
    /// # Panics
    /// See [`begin_write`](Self::begin_write).
    pub fn begin_swap(&self, port: Port, block: u64, bytes: &mut [u8]) -> WriteId {
        let id = self.begin_write(port, block..block + 1, bytes);
        let mut state = self.lock();
        state.writes.get_mut(&id).expect("just begun").is_swap = true;
        id
    }

    /// Must be called before a command that sets these blocks to zero is sent.
    ///
    /// # Panics
    /// Panics if the blocks are out of range.
    pub fn begin_zero(&self, port: Port, blocks: Range<u64>) -> WriteId {
        self.lock().begin_write(port, blocks, true)
    }

    /// Must be called when a write has returned GOOD.
    ///
    /// # Errors
    /// Returns a [`Violation`] if previous reads are not consistent with this write.
    ///
    /// # Panics
    /// Panics if this write has already completed.
    pub fn acknowledge(&self, id: WriteId) -> Result<(), Violation> {
        self.lock().acknowledge(id, false)
    }

    /// Must be called when a write has returned GOOD and its data is already on the medium, because
    /// FUA was set or the unit doesn't have a volatile cache.
    ///
    /// # Errors
    /// Returns a [`Violation`], see [`acknowledge`](Self::acknowledge).
    ///
    /// # Panics
    /// Panics if this write has already completed.
    pub fn acknowledge_durable(&self, id: WriteId) -> Result<(), Violation> {
        self.lock().acknowledge(id, true)
    }

    /// Must be called when a COMPARE AND WRITE for a single block has returned GOOD. `expected` is
    /// the data used in the comparison, and `is_durable` indicates whether the new data is on the
    /// medium.
    ///
    /// # Errors
    /// Returns a [`Violation`] if this is not possible.
    ///
    /// # Panics
    /// Panics if this write has already completed.
    pub fn acknowledge_swap(
        &self,
        id: WriteId,
        expected: &[u8],
        is_durable: bool,
    ) -> Result<(), Violation> {
        let mut state = self.lock();
        let (begin, block, cuts) = state.names_of(id);
        // If there was a power failure in between, we don't know which of the two states was used
        // in the comparison.
        if cuts == state.durability.cuts() && !state.is_torn(block, expected, begin) {
            let now = state.tick();
            state.observe_block(block, expected, (begin, now))?;
            state.swap(block, expected, begin)?;
        }
        state.swapped += 1;
        state.acknowledge(id, is_durable)
    }

    /// Must be called when a COMPARE AND WRITE has returned MISCOMPARE, so that no data was
    /// written.
    ///
    /// # Errors
    /// Returns [`Violation::Refuted`] if its data was returned by a read.
    ///
    /// # Panics
    /// Panics if this write has already completed.
    pub fn refute(&self, id: WriteId) -> Result<(), Violation> {
        let mut state = self.lock();
        let (begin, block, _) = state.names_of(id);
        let version = state.writes[&id].version;
        let now = state.tick();
        let (port, _) = state.end_write(id, now, false);
        state.fence(port, begin, block..block + 1, now);
        let entries = &state.blocks[block as usize];
        let was_seen = entries.iter().any(|e| e.version == version && e.is_certain);
        state.remove(block, version);
        match was_seen {
            true => Err(Violation::Refuted { block, version }),
            false => Ok(()),
        }
    }

    /// Must be called when a write has returned an error. The write has completed, but it could
    /// have been applied to any of its blocks.
    ///
    /// # Panics
    /// Panics if this write has already completed.
    pub fn refuse(&self, id: WriteId) {
        let mut state = self.lock();
        let (begin, ..) = state.names_of(id);
        let blocks = state.writes[&id].blocks.clone();
        let now = state.tick();
        let (port, _) = state.end_write(id, now, false);
        state.fence(port, begin, blocks, now);
    }

    /// Must be called when there is no response to a write. It could still be applied until there
    /// is a fence for its port.
    ///
    /// # Panics
    /// Panics if this write has already completed.
    pub fn lose(&self, id: WriteId) {
        let mut state = self.lock();
        let now = state.tick();
        let write = state.writes.get_mut(&id).expect("a write under way");
        assert!(write.lost.replace(now).is_none(), "it was lost before");
    }

    /// Returns the number of writes that could still be applied, although the initiator will not
    /// wait for them.
    #[must_use]
    pub fn lost(&self) -> usize {
        self.lock()
            .writes
            .values()
            .filter(|w| w.lost.is_some())
            .count()
    }

    /// Returns the number of successful COMPARE AND WRITE commands.
    #[must_use]
    pub fn swapped(&self) -> u64 {
        self.lock().swapped
    }

    /// Returns the number of versions we need to keep for all blocks. These can still be returned
    /// by a new read, or could be used by a pending command.
    #[must_use]
    pub fn versions(&self) -> usize {
        self.lock().blocks.iter().map(Vec::len).sum()
    }

    /// Must be called before a read is sent.
    pub fn begin_read(&self, port: Port, blocks: Range<u64>) -> ReadId {
        let mut state = self.lock();
        let begin = state.tick();
        let cuts = state.durability.cuts();
        let read = Read {
            port,
            begin,
            cuts,
            blocks,
        };
        state.reads.insert(ReadId(begin), read);
        ReadId(begin)
    }

    /// Must be called when a read has returned GOOD, with the data received.
    ///
    /// # Errors
    /// Returns a [`Violation`] if this data is not possible.
    ///
    /// # Panics
    /// Panics if this read has already completed, or if `bytes` doesn't have the correct length.
    pub fn end_read(&self, id: ReadId, bytes: &[u8]) -> Result<(), Violation> {
        let mut state = self.lock();
        let read = state.reads.get(&id).expect("a read under way").clone();
        let len = (read.blocks.end - read.blocks.start) * BLOCK as u64;
        assert_eq!(bytes.len() as u64, len, "the whole response");
        let now = state.tick();
        // This fence could remove old versions, but we need to keep all versions that this read may
        // have returned.
        state.fence(read.port, read.begin, read.blocks.clone(), now);
        state.reads.remove(&id);
        // If there was a power failure before the response, the read may have been executed before
        // or after it.
        let is_across = read.cuts != state.durability.cuts();
        for (block, bytes) in read.blocks.zip(bytes.chunks_exact(BLOCK)) {
            if state.is_torn(block, bytes, read.begin) {
                continue;
            }
            match is_across {
                true => drop(state.version_of(block, bytes)?),
                false => state.observe_block(block, bytes, (read.begin, now))?,
            }
        }
        Ok(())
    }

    /// Must be called after a crash if the disk has torn a block. Its data can be returned until the
    /// block is written again.
    ///
    /// # Errors
    /// Returns [`Violation::Torn`] if all writes of this block were durable.
    pub fn tear(&self, block: u64, bytes: &[u8]) -> Result<(), Violation> {
        let mut state = self.lock();
        let Err(violation) = state.version_of(block, bytes) else {
            return Ok(());
        };
        if !state.has_volatile(block) {
            return Err(violation);
        }
        let tear = Tear {
            bytes: bytes.to_vec(),
            begin: state.tick(),
            end: u64::MAX,
        };
        state.torn.insert(block, tear);
        Ok(())
    }

    /// Must be called when a read has failed or there is no response.
    pub fn abandon_read(&self, id: ReadId) {
        self.lock().reads.remove(&id);
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Returns the start time of a write, its first block, and the number of power failures before
    /// it.
    fn names_of(&self, id: WriteId) -> (u64, u64, usize) {
        let write = self.writes.get(&id).expect("a write under way");
        (write.begin, write.blocks.start, write.cuts)
    }

    fn begin_write(&mut self, port: Port, blocks: Range<u64>, is_zero: bool) -> WriteId {
        self.sequence += 1;
        let version = Version {
            sequence: self.sequence,
            writer: port,
        };
        let begin = self.tick();
        for block in blocks.clone() {
            self.blocks[block as usize].push(Entry::new(version, is_zero, begin));
        }
        let id = WriteId(version.sequence);
        let write = Write {
            version,
            begin,
            cuts: self.durability.cuts(),
            blocks,
            is_swap: false,
            lost: None,
        };
        self.writes.insert(id, write);
        id
    }

    /// Returns whether a read that was started at `begin` can return this data of a torn block.
    fn is_torn(&self, block: u64, bytes: &[u8], begin: u64) -> bool {
        let tear = self.torn.get(&block);
        tear.is_some_and(|tear| begin < tear.end && tear.bytes == bytes)
    }

    fn acknowledge(&mut self, id: WriteId, is_durable: bool) -> Result<(), Violation> {
        let (begin, _, cuts) = self.names_of(id);
        let write = &self.writes[&id];
        let (version, blocks) = (write.version, write.blocks.clone());
        let now = self.tick();
        for block in blocks.clone() {
            let mut entries = self.blocks[block as usize].iter_mut();
            let entry = entries.find(|e| e.version == version);
            let entry = entry.expect("kept while it is under way");
            entry.acknowledged = Some(now);
            entry.is_durable = is_durable;
        }
        for block in blocks.clone() {
            // Otherwise it may have been executed before the crash.
            let tear = self.torn.get_mut(&block).filter(|tear| tear.begin < begin);
            if let Some(tear) = tear {
                tear.end = tear.end.min(now);
            }
        }
        // If the write was started before a power failure, it may have been executed before it and
        // then lost.
        let is_certain = is_durable || cuts == self.durability.cuts();
        let (port, result) = self.end_write(id, now, is_certain);
        if is_durable {
            for block in blocks.clone() {
                if cuts != self.durability.cuts() {
                    self.replace_survivors(block, begin);
                }
                self.forget_overwritten(block);
            }
        }
        self.fence(port, begin, blocks, now);
        result
    }

    fn end_write(
        &mut self,
        id: WriteId,
        now: u64,
        is_certain: bool,
    ) -> (Port, Result<(), Violation>) {
        let write = self.writes.remove(&id).expect("a write under way");
        let oldest = self.oldest_read().unwrap_or(now);
        let mut result = Ok(());
        let durability = &mut self.durability;
        for block in write.blocks.clone() {
            let entries = &mut self.blocks[block as usize];
            let at = entries.iter().position(|e| e.version == write.version);
            let at = at.expect("kept while it is under way");
            let entry = &mut entries[at];
            entry.end = now;
            entry.first_end = entry.first_end.min(now);
            entry.is_certain |= is_certain;
            result = result.and(check(block, entries, at));
            durability.keep_entries(block, prune(entries, oldest));
        }
        (write.version.writer, result)
    }

    /// Returns the start time of the oldest pending command that could return data it has already
    /// read.
    fn oldest_read(&self) -> Option<u64> {
        let swaps = self.writes.values();
        let swaps = swaps.filter(|w| w.is_swap && w.lost.is_none());
        let reads = self.reads.values().next().map(|read| read.begin);
        reads.into_iter().chain(swaps.map(|w| w.begin)).min()
    }

    /// Handles the completion of a command from this port that was started at `begin` and used
    /// these blocks. Any commands that were lost before this have completed as well. If there are
    /// no blocks, this is a login, which completes all of them.
    fn fence(&mut self, port: Port, begin: u64, blocks: Range<u64>, now: u64) {
        let is_met = |w: &Write| {
            blocks.is_empty() || w.blocks.start < blocks.end && blocks.start < w.blocks.end
        };
        let is_over = |w: &Write| {
            let is_older = w.lost.is_some_and(|lost| lost < begin);
            w.version.writer == port && is_older && (!self.by_block || is_met(w))
        };
        let over: Vec<WriteId> = self
            .writes
            .iter()
            .filter_map(|(id, write)| is_over(write).then_some(*id))
            .collect();
        for id in over {
            let _ = self.end_write(id, now, false);
        }
    }

    /// Returns the version for the data in a block.
    fn version_of(&self, block: u64, bytes: &[u8]) -> Result<Version, Violation> {
        let Some(seen) = Version::of(block, bytes) else {
            let said = u64::from_be_bytes(bytes[8..16].try_into().expect("eight bytes"));
            let said = Version {
                sequence: said >> 16,
                writer: Port(said as u16),
            };
            let mut whole = [0; BLOCK];
            said.fill(block, &mut whole);
            let byte = whole.iter().zip(bytes).position(|(a, b)| a != b);
            let byte = byte.unwrap_or(0);
            let found = bytes[byte & !7..].first_chunk().expect("a word of a block");
            return Err(Violation::Torn {
                block,
                byte,
                said,
                found: u64::from_be_bytes(*found),
            });
        };
        match seen.sequence > self.sequence {
            true => Err(Violation::Stale { block, seen }),
            false => Ok(seen),
        }
    }

    /// Returns the index of the version that was read, or `None` if there is more than one possible
    /// version.
    fn place_of(&self, block: u64, bytes: &[u8]) -> Result<Option<usize>, Violation> {
        let seen = self.version_of(block, bytes)?;
        let is_it = |e: &Entry| match seen == Version::NONE {
            true => e.is_zero,
            false => !e.is_zero && e.version == seen,
        };
        let entries = self.blocks[block as usize].iter();
        let mut places = entries.enumerate().filter(|(_, e)| is_it(e));
        match (places.next(), places.next()) {
            (None, _) => Err(Violation::Stale { block, seen }),
            (Some((at, _)), None) => Ok(Some(at)),
            _ => Ok(None),
        }
    }

    fn observe_block(
        &mut self,
        block: u64,
        bytes: &[u8],
        (begin, end): (u64, u64),
    ) -> Result<(), Violation> {
        let Some(at) = self.place_of(block, bytes)? else {
            self.survive_as_zeroes(block);
            return Ok(());
        };
        let repeats = self.repeats;
        let entries = &mut self.blocks[block as usize];
        entries[at].on_read(begin, end, repeats);
        check(block, entries, at)?;
        self.survive(block, at);
        Ok(())
    }

    /// Handles a successful comparison with this data by a write that was started at `begin`.
    fn swap(&mut self, block: u64, expected: &[u8], begin: u64) -> Result<(), Violation> {
        let Some(at) = self.place_of(block, expected)? else {
            return Ok(());
        };
        let entry = &mut self.blocks[block as usize][at];
        // If a write can be retried until it completes, the version may have been written twice.
        // This could also happen after a power failure.
        let is_once = entry.end < begin && entry.origin.is_none();
        let version = entry.version;
        match std::mem::replace(&mut entry.is_swapped, is_once) && is_once {
            true => Err(Violation::SwappedTwice { block, version }),
            false => Ok(()),
        }
    }
}

/// Checks if this version is consistent with all other versions of the block.
fn check(block: u64, entries: &[Entry], at: usize) -> Result<(), Violation> {
    let entry = &entries[at];
    match entries.iter().find(|other| entry.conflicts(other)) {
        None => Ok(()),
        Some(other) => Err(Violation::Disorder {
            block,
            versions: [entry.version, other.version],
            zones: [entry.zone(), other.zone()],
        }),
    }
}

/// Removes versions we no longer need. A version can be removed if there is another version
/// that was started after its completion, and that completed before any pending read was started.
/// If a read returned the old version, we would still report an error because it was overwritten:
/// any zone that starts in the old version's zone and includes the current time would contain the
/// zone of the other version. Returns the removed versions.
fn prune(entries: &mut Vec<Entry>, oldest_read: u64) -> Vec<Entry> {
    let newest = entries
        .iter()
        .filter(|e| e.is_certain && e.end != u64::MAX && e.zone().1 < oldest_read)
        .map(|e| e.zone().0)
        .max();
    let Some(newest) = newest else {
        return Vec::new();
    };
    let is_over = |e: &mut Entry| e.end != u64::MAX && e.zone().1 < newest;
    entries.extract_if(.., is_over).collect()
}

#[cfg(test)]
mod tests;
