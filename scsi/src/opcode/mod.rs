//! The opcode table: what commands there are.
//!
//! One row per command, or per service action, says everything general about it: name, CDB length
//! and usage bitmap, direction, what must hold before it may run, the recommended timeout, and the
//! function that plans it. The same rows refuse reserved bits and answer REPORT SUPPORTED OPERATION
//! CODES, so what is reported cannot differ from what is done.
//!
//! A CDB is looked up once, by [`Opcode::of`], where a transport delivers it; its row travels with
//! the command from there.

mod report;
mod table;

use crate::cdb::{ACTION_MASK, Cdb, Usage};
use crate::commands::machine::PlanFn;
use crate::data::cdb::{inquiry, unmap, write_same_16};
use crate::data::vpd;
use crate::flags::CommandFlags;
use crate::sense::{AdditionalSense, Sense};
use crate::task::{Blocks, Footprint};

/// Direction of a command's data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// No data in either direction.
    None,
    /// Data-In: from the logical unit to the initiator.
    In,
    /// Data-Out: from the initiator to the logical unit.
    Out,
}

/// Kind of a command, for counters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Reads blocks, and changes nothing.
    Read,
    /// Writes blocks, with data of their own or repeated ones.
    Write,
    /// Makes what was written durable.
    Flush,
    /// Deallocates blocks, whose content is lost.
    Unmap,
    /// Compares or verifies blocks.
    Compare,
    /// Everything that is not about blocks, and unknown commands.
    Other,
}

/// Amount of data of a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Volume {
    /// Whether it changes the medium.
    pub is_write: bool,
    /// Bytes that it reads from the medium, takes from the initiator, or writes many times.
    pub bytes: u64,
    /// Whether they come from the initiator.
    pub is_sent: bool,
}

/// One row of the table.
#[derive(Debug)]
pub struct Opcode {
    /// OPERATION CODE, byte 0 of the CDB.
    pub code: u8,
    /// SERVICE ACTION, for operation codes that have them.
    pub service_action: Option<u8>,
    /// The command's name in its standard.
    pub name: &'static str,
    /// CDB USAGE DATA of REPORT SUPPORTED OPERATION CODES.
    pub(crate) usage: Usage,
    /// Direction of the data.
    pub direction: Direction,
    /// Recommended command timeout in seconds.
    pub timeout: u32,
    /// Kind of the command.
    pub kind: Kind,
    pub(crate) flags: CommandFlags,
    pub(crate) plan: PlanFn,
}

/// Stands for every operation code that is not in the table.
static UNKNOWN: Opcode =
    unknown(|_, _| Err(Sense::illegal(AdditionalSense::INVALID_OPERATION_CODE).into()));

/// Stands for every service action that is not in the table, of operation codes that are.
static UNKNOWN_ACTION: Opcode = unknown(|_, _| Err(INVALID_ACTION.into()));

const INVALID_ACTION: Sense = Sense::cdb_field(1, Some(4));

/// The row of a command that is refused, also where another nexus has reserved the unit, once the
/// unit attentions before it are reported.
const fn unknown(plan: PlanFn) -> Opcode {
    Opcode {
        code: 0xff,
        service_action: None,
        name: "unknown command",
        usage: Usage::UNKNOWN,
        direction: Direction::None,
        timeout: 0,
        kind: Kind::Other,
        flags: CommandFlags::UNDER_RESERVE,
        plan,
    }
}

/// Row at which each operation code starts; `NO_ROW` where there is none.
static FIRST: [u8; 256] = {
    let mut first = [NO_ROW; 256];
    let mut row = table::TABLE.len();
    while row > 0 {
        // From the last row to the first, so that the first of an operation code stays.
        row -= 1;
        first[table::TABLE[row].code as usize] = row as u8;
    }
    first
};

const NO_ROW: u8 = u8::MAX;

/// The rows of an operation code.
fn with_code(code: u8) -> impl Iterator<Item = &'static Opcode> {
    let first = usize::from(FIRST[usize::from(code)]);
    Opcode::all()
        .get(first..)
        .unwrap_or_default()
        .iter()
        .take_while(move |row| row.code == code)
}

const INQUIRY: &Opcode = Opcode::named("INQUIRY");
const START_STOP_UNIT: &Opcode = Opcode::named("START STOP UNIT");

impl Opcode {
    /// Every command, in ascending order of operation codes and service actions.
    #[must_use]
    pub fn all() -> &'static [Self] {
        &table::TABLE
    }

    /// The row of a CDB. That of a command that is not in the table refuses it.
    #[must_use]
    pub fn of(cdb: &[u8]) -> &'static Self {
        // A transport may deliver nothing at all. Even that is refused by a row, so no caller
        // needs a case of its own.
        let Some(&code) = cdb.first() else {
            return &UNKNOWN;
        };
        let row = usize::from(FIRST[usize::from(code)]);
        match Self::all().get(row) {
            None => &UNKNOWN,
            Some(row) if row.service_action.is_none() => row,
            Some(_) => {
                // A CDB that ends before its service action finds no row, and is refused as an
                // unknown one.
                let action = cdb.get(1).map(|byte| byte & ACTION_MASK);
                with_code(code)
                    .find(|row| row.service_action == action)
                    .unwrap_or(&UNKNOWN_ACTION)
            }
        }
    }

    /// The row of a CDB that an initiator sends: also that of a command that a unit of ours does
    /// not offer.
    #[must_use]
    pub fn sent(cdb: &[u8]) -> &'static Self {
        let row = Self::of(cdb);
        let action = cdb.get(1).map(|byte| byte & ACTION_MASK);
        let is_sent = |row: &&Self| cdb.first() == Some(&row.code) && row.service_action == action;
        match row.is_known() {
            true => row,
            false => table::FOREIGN.iter().find(is_sent).unwrap_or(row),
        }
    }

    /// The row with a name, for constants.
    ///
    /// # Panics
    /// No command has this name.
    #[must_use]
    pub const fn named(name: &str) -> &'static Self {
        match find(&table::TABLE, name) {
            Some(row) => row,
            None => find(&table::FOREIGN, name).expect("a command has this name"),
        }
    }

    /// A CDB of the command whose other fields are zero.
    #[must_use]
    pub fn cdb(&self) -> Cdb {
        Cdb::new(self.code, self.service_action, &self.usage)
    }

    /// Returns whether a command is known to change nothing, neither the medium nor the unit.
    #[must_use]
    pub fn changes_nothing(&self) -> bool {
        let changing = CommandFlags::WRITES
            | CommandFlags::CHANGES
            | CommandFlags::SETTINGS
            | CommandFlags::UNDER_RESERVE;
        !self.flags.intersects(changing)
    }

    /// Whether it is a row of the table.
    #[must_use]
    pub fn is_known(&self) -> bool {
        !self.is(&UNKNOWN) && !self.is(&UNKNOWN_ACTION)
    }

    /// Returns whether it is this row.
    #[must_use]
    pub fn is(&self, row: &Self) -> bool {
        std::ptr::eq(self, row)
    }

    /// CDB usage bitmap, as long as the CDB (SPC-4 6.35). A bit is one if it is evaluated; one
    /// that is zero must be zero in the CDB.
    #[must_use]
    pub fn usage(&self) -> &[u8] {
        self.usage.bytes()
    }

    /// Whether the command runs although a unit attention is pending.
    #[must_use]
    pub fn is_free_of_attention(&self) -> bool {
        self.flags.contains(CommandFlags::UNDER_ATTENTION)
    }

    /// Returns whether the command asks for the names of the unit: INQUIRY of the page Unit Serial
    /// Number or Device Identification (SPC-4 7.8). Standard INQUIRY data do not distinguish
    /// units.
    #[must_use]
    pub fn asks_for_names(&self, cdb: &[u8]) -> bool {
        const NAMES: [u8; 2] = [vpd::UNIT_SERIAL_NUMBER, vpd::DEVICE_IDENTIFICATION];
        self.is(INQUIRY)
            && inquiry::EVPD.get(cdb) == Some(true)
            && inquiry::PAGE_CODE
                .get(cdb)
                .is_some_and(|page| NAMES.contains(&page))
    }

    /// The sense of a command that this unit does not offer.
    pub(crate) fn unsupported(&self) -> Sense {
        if self.service_action.is_some() {
            INVALID_ACTION
        } else {
            Sense::illegal(AdditionalSense::INVALID_OPERATION_CODE)
        }
    }

    /// The flags as far as reservations look at them. Everyone may start a unit (SPC-4 table 51).
    pub(crate) fn flags_under_reservation(&self, cdb: &[u8]) -> CommandFlags {
        // START, and no POWER CONDITION.
        let starts = cdb.get(4).is_some_and(|byte| byte & 0xf1 == 0x01);
        if starts && self.is(START_STOP_UNIT) {
            return self.flags - CommandFlags::CHANGES;
        }
        self.flags
    }

    /// The blocks that the command changes on the medium, for the task set.
    #[must_use]
    pub fn footprint(&self, cdb: &[u8]) -> Footprint {
        // Only what changes the medium can be in the way of an atomic command, or have to wait for
        // one.
        if !self.flags.contains(CommandFlags::WRITES) {
            return Footprint::None;
        }
        let blocks = match self.kind {
            // The blocks of an UNMAP are in its data.
            Kind::Unmap => Some(Blocks::ALL),
            _ => self.blocks(cdb),
        };
        match blocks {
            Some(blocks) if self.flags.contains(CommandFlags::ATOMIC) => Footprint::Atomic(blocks),
            Some(blocks) => Footprint::Writes(blocks),
            None => Footprint::None,
        }
    }

    /// The blocks that a CDB is about; `None` for commands without, and where it is too short.
    #[must_use]
    pub fn blocks(&self, cdb: &[u8]) -> Option<Blocks> {
        if matches!(self.kind, Kind::Unmap | Kind::Other) {
            return None;
        }
        // Masked, and not parsed: this is asked before the CDB has been checked, and makes no
        // sense data.
        let extent = Cdb::masked(cdb, &self.usage)?.extent();
        Some(Blocks {
            first: extent.lba,
            // Nothing has compared the LBA with the capacity yet. A run that would wrap reaches to
            // the end of all blocks, so it overlaps what it could.
            end: extent.lba.saturating_add(extent.blocks),
        })
    }

    /// The amount of data of a command by its CDB alone, for those who count it before it starts;
    /// `None` for one that moves no blocks. VERIFY reads its blocks for any BYTCHK. WRITE
    /// SAME writes all of its blocks, unless it has none to write (NDOB) and is to unmap them: one
    /// that has a block may find that it cannot unmap.
    #[must_use]
    pub fn volume(&self, cdb: &[u8], block_size: u32) -> Option<Volume> {
        if matches!(self.kind, Kind::Flush | Kind::Other) {
            return None;
        }
        let cdb = Cdb::masked(cdb, &self.usage)?;
        let is_write = self.flags.contains(CommandFlags::WRITES);
        let repeats = self.flags.contains(CommandFlags::REPEATS);
        let block = u64::from(block_size);
        let (ndob, unmaps) = (cdb.get(write_same_16::NDOB), cdb.get(write_same_16::UNMAP));
        let bytes = match self.kind {
            Kind::Unmap => cdb.get(unmap::PARAMETER_LIST_LENGTH).into(),
            // COMPARE AND WRITE: what is compared, and what is written.
            Kind::Compare if is_write => 2 * cdb.extent().blocks * block,
            _ if repeats && ndob && unmaps => block,
            _ => cdb.extent().blocks * block,
        };
        Some(Volume {
            is_write,
            bytes,
            // WRITE SAME takes one block however many it writes, so the length of its Data-Out
            // bounds nothing.
            is_sent: is_write && !repeats,
        })
    }
}

/// The row with a name, for constants.
const fn find(rows: &'static [Opcode], name: &str) -> Option<&'static Opcode> {
    let mut row = 0;
    while row < rows.len() {
        if is_same(rows[row].name, name) {
            return Some(&rows[row]);
        }
        row += 1;
    }
    None
}

/// Equality of strings, for constants.
const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_those_of_blocks_and_of_data_that_are_taken() {
        let volume = |cdb: &[u8]| {
            Opcode::of(cdb)
                .volume(cdb, 512)
                .map(|v| (v.is_write, v.bytes))
        };
        // READ (6), (10), (16).
        assert_eq!(volume(&[0x08, 0, 0, 1, 0, 0]), Some((false, 256 * 512)));
        assert_eq!(
            volume(&[0x28, 0, 0, 0, 0, 4, 0, 1, 2, 0]),
            Some((false, 0x102 * 512))
        );
        let read = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0, 0, 1, 0, 0];
        assert_eq!(volume(&read), Some((false, 0xff00_0001 * 512)));
        // VERIFY (10), with data and without.
        assert_eq!(
            volume(&[0x2f, 2, 0, 0, 0, 4, 0, 0, 9, 0]),
            Some((false, 9 * 512))
        );
        assert_eq!(
            volume(&[0x2f, 0, 0, 0, 0, 4, 0, 0, 9, 0]),
            Some((false, 9 * 512))
        );
        // WRITE (10), UNMAP, WRITE SAME (16), COMPARE AND WRITE.
        assert_eq!(
            volume(&[0x2a, 0, 0, 0, 0, 4, 0, 1, 2, 0]),
            Some((true, 0x102 * 512))
        );
        assert_eq!(
            volume(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0]),
            Some((true, 24))
        );
        let same = [0x93, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0, 0, 0, 0];
        assert_eq!(volume(&same), Some((true, 0x00ff_0000 * 512)));
        let same = |flags| [0x93, flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0];
        // UNMAP, which needs a block of zeroes; NDOB; both.
        assert_eq!(volume(&same(0x08)), Some((true, 8 * 512)));
        assert_eq!(volume(&same(0x01)), Some((true, 8 * 512)));
        assert_eq!(volume(&same(0x09)), Some((true, 512)));
        let same = [0x41, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        assert_eq!(volume(&same), Some((true, 8 * 512)));
        let compare = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0];
        assert_eq!(volume(&compare), Some((true, 6 * 512)));
        // TEST UNIT READY, SYNCHRONIZE CACHE (10), one that is too short, one that is unknown.
        assert_eq!(volume(&[0; 6]), None);
        assert_eq!(volume(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(volume(&[0x28, 0, 0]), None);
        assert_eq!(volume(&[0xff; 16]), None);
    }

    #[test]
    fn rows_are_sorted_and_consistent() {
        for pair in Opcode::all().windows(2) {
            let key = |entry: &Opcode| (entry.code, entry.service_action);
            assert!(key(&pair[0]) < key(&pair[1]), "{}", pair[1].name);
        }
        for entry in Opcode::all() {
            // SPC-4 4.2.5.1: the group code in bits 7 to 5 gives the length.
            let len = match entry.code >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                5 => 12,
                group => panic!("group {group} has no fixed length"),
            };
            assert_eq!(entry.usage().len(), len, "{}", entry.name);
            assert_eq!(entry.usage()[0], entry.code, "{}", entry.name);
            let mut cdb = vec![0; len];
            cdb[0] = entry.code;
            cdb[1] = entry.service_action.unwrap_or(0);
            assert!(Opcode::of(&cdb).is(entry), "{}", entry.name);
            assert_eq!(entry.kind, kind_of(entry.name), "{}", entry.name);
        }
        assert_eq!(UNKNOWN.kind, Kind::Other);
    }

    /// The kind of a command that its name says. Metrics count by kinds, and nothing else would
    /// notice a wrong one.
    fn kind_of(name: &str) -> Kind {
        match name.split(' ').next().unwrap() {
            "READ" if name.starts_with("READ (") => Kind::Read,
            "WRITE" | "ORWRITE" => Kind::Write,
            "SYNCHRONIZE" => Kind::Flush,
            "UNMAP" => Kind::Unmap,
            "COMPARE" | "VERIFY" => Kind::Compare,
            _ => Kind::Other,
        }
    }

    #[test]
    fn initiators_know_commands_of_others() {
        let groups = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0];
        assert!(!Opcode::of(&groups).is_known());
        assert_eq!(Opcode::sent(&groups).name, "REPORT TARGET PORT GROUPS");
        assert!(Opcode::sent(&groups).changes_nothing());
        assert!(Opcode::sent(&[0x12]).is(INQUIRY));
        for unknown in [&[0xa3, 0x0b][..], &[0xa4, 0x0a], &[]] {
            assert!(!Opcode::sent(unknown).is_known());
        }
    }

    #[test]
    fn what_changes_nothing_may_be_sent_again() {
        let changing = Opcode::all().iter().filter(|row| !row.changes_nothing());
        #[rustfmt::skip]
        assert_eq!(changing.map(|row| row.name).collect::<Vec<_>>(), [
            "WRITE (6)", "MODE SELECT (6)", "RESERVE (6)", "RELEASE (6)", "START STOP UNIT",
            "WRITE (10)", "WRITE AND VERIFY (10)", "SYNCHRONIZE CACHE (10)", "WRITE SAME (10)",
            "UNMAP", "MODE SELECT (10)", "RESERVE (10)", "RELEASE (10)",
            "PERSISTENT RESERVE OUT, REGISTER", "PERSISTENT RESERVE OUT, RESERVE",
            "PERSISTENT RESERVE OUT, RELEASE", "PERSISTENT RESERVE OUT, CLEAR",
            "PERSISTENT RESERVE OUT, PREEMPT", "PERSISTENT RESERVE OUT, PREEMPT AND ABORT",
            "PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY",
            "COMPARE AND WRITE", "WRITE (16)", "ORWRITE (16)", "WRITE AND VERIFY (16)",
            "SYNCHRONIZE CACHE (16)", "WRITE SAME (16)", "WRITE (12)", "WRITE AND VERIFY (12)",
        ]);
        assert!(!UNKNOWN.changes_nothing() && !UNKNOWN_ACTION.changes_nothing());
    }

    #[test]
    fn unknown_codes_and_actions_are_distinguished() {
        assert!(Opcode::of(&[]).is(&UNKNOWN));
        assert!(Opcode::of(&[0xff]).is(&UNKNOWN));
        assert!(Opcode::of(&[0x9e, 0x11]).is(&UNKNOWN_ACTION));
        assert!(Opcode::of(&[0x9e]).is(&UNKNOWN_ACTION));
        assert!(!UNKNOWN.is_known() && !UNKNOWN_ACTION.is_known());
        assert_eq!(Opcode::of(&[0x93]).name, "WRITE SAME (16)");
        assert_eq!(Opcode::of(&[0x2a]).direction, Direction::Out);
        let mut rig = crate::tests::Rig::new();
        assert_eq!(rig.send(&[]).check(), (5, 0x20, 0));
        assert_eq!(rig.send(&[0xff; 16]).check(), (5, 0x20, 0));
        assert_eq!(rig.send(&[0x9e, 0x11]).cdb_pointer(), (1, Some(4)));
        assert_eq!(rig.send(&[0x9e]).cdb_pointer(), (1, Some(4)));
    }
}
