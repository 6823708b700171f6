//! The opcode table, with all commands that we support.
//!
//! For each command or service action there is a row with the name, CDB length and usage bitmap,
//! data direction, required state, recommended timeout, and the function used to plan the command.
//! We use the same rows to check for reserved bits and to create the REPORT SUPPORTED OPERATION
//! CODES response, so that the reported values always match the implementation.
//!
//! The transport calls [`Opcode::of`] for every incoming CDB, and then passes the row on with the
//! command.

mod report;
mod table;

use crate::cdb::{ACTION_MASK, Cdb, Usage};
use crate::commands::machine::PlanFn;
use crate::config::Protection;
use crate::data::cdb::{block_32, inquiry, unmap};
use crate::data::vpd;
use crate::flags::CommandFlags;
use crate::lu::LogicalUnit;
use crate::sense::{AdditionalSense, Sense};
use crate::step::TaskAttribute;
use crate::task::{Blocks, Footprint};

/// Data direction of a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// No data transfer.
    None,
    /// Data-In: from the logical unit to the initiator.
    In,
    /// Data-Out: from the initiator to the logical unit.
    Out,
}

/// Type of a command, used for counters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Reads blocks without changing them.
    Read,
    /// Writes blocks, using either new or repeated data.
    Write,
    /// Flushes written data to stable storage.
    Flush,
    /// Deallocates blocks. Their data is lost.
    Unmap,
    /// Compares or verifies blocks.
    Compare,
    /// Any command that does not access blocks, including unknown commands.
    Other,
}

/// The amount of data transferred by a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Volume {
    /// Set when this changes the medium.
    pub is_write: bool,
    /// Number of bytes to read from the medium, receive from the initiator, or write repeatedly.
    pub bytes: u64,
    /// Set when the data is sent by the initiator.
    pub is_sent: bool,
}

/// A row in the table.
#[derive(Debug)]
pub struct Opcode {
    /// OPERATION CODE in byte 0 of the CDB.
    pub code: u8,
    /// SERVICE ACTION, if used for this operation code.
    pub service_action: Option<u8>,
    /// The name of the command in the standard.
    pub name: &'static str,
    /// CDB USAGE DATA for REPORT SUPPORTED OPERATION CODES.
    pub(crate) usage: Usage,
    /// Data direction.
    pub direction: Direction,
    /// Recommended command timeout in seconds.
    pub timeout: u32,
    /// Type of the command.
    pub kind: Kind,
    pub(crate) flags: CommandFlags,
    pub(crate) plan: PlanFn,
}

/// Used for all operation codes that are not in the table.
static UNKNOWN: Opcode = unknown(|_, _| Err(INVALID_OPERATION_CODE.into()));

/// Used for an operation code that is in the table, but without this service action.
static UNKNOWN_ACTION: Opcode = unknown(|_, _| Err(INVALID_ACTION.into()));

/// Used for a 32-byte CDB with an unknown service action.
static UNKNOWN_LONG_ACTION: Opcode = unknown(|planner, _| {
    // Without type 2 protection, there are no service actions at all.
    let protection = planner.lu.protection();
    match protection.is_some_and(Protection::is_type_2) {
        true => Err(Sense::cdb_field(block_32::SERVICE_ACTION.at() as u16, Some(7)).into()),
        false => Err(INVALID_OPERATION_CODE.into()),
    }
});

const INVALID_ACTION: Sense = Sense::cdb_field(1, Some(4));
const INVALID_OPERATION_CODE: Sense = Sense::illegal(AdditionalSense::INVALID_OPERATION_CODE);

/// Largest value of RDPROTECT, WRPROTECT, VRPROTECT and ORPROTECT that is not reserved.
const PROTECT_MAX: u8 = 0b101;

/// Creates a new row for a command that is always refused, even if the LU is reserved by another
/// nexus, but after any pending unit attention has been reported.
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

/// Index of the first row for each operation code, or `NO_ROW`.
static FIRST: [u8; 256] = {
    let mut first = [NO_ROW; 256];
    let mut row = table::TABLE.len();
    while row > 0 {
        // Use reverse order, so that the first row for an operation code is set last.
        row -= 1;
        first[table::TABLE[row].code as usize] = row as u8;
    }
    first
};

const NO_ROW: u8 = u8::MAX;

/// Returns the rows for an operation code.
fn with_code(code: u8) -> impl Iterator<Item = &'static Opcode> {
    let first = usize::from(FIRST[usize::from(code)]);
    Opcode::all()
        .get(first..)
        .unwrap_or_default()
        .iter()
        .take_while(move |row| row.code == code)
}

/// Returns the SERVICE ACTION of a CDB, or `None` if the CDB is too short.
fn service_action(cdb: &[u8]) -> Option<u16> {
    match cdb.first()? {
        &block_32::VARIABLE_LENGTH => block_32::SERVICE_ACTION.get(cdb),
        _ => cdb.get(1).map(|byte| u16::from(byte & ACTION_MASK)),
    }
}

const INQUIRY: &Opcode = Opcode::named("INQUIRY");
const START_STOP_UNIT: &Opcode = Opcode::named("START STOP UNIT");

impl Opcode {
    /// Returns all commands, sorted by operation code and service action.
    #[must_use]
    pub fn all() -> &'static [Self] {
        &table::TABLE
    }

    /// Returns the row for a CDB. If the command is not in the table, this returns a row that will
    /// refuse it.
    #[must_use]
    pub fn of(cdb: &[u8]) -> &'static Self {
        // The transport may even pass an empty CDB. We also return a row for this, so that the
        // caller doesn't need to handle it.
        let Some(&code) = cdb.first() else {
            return &UNKNOWN;
        };
        let row = usize::from(FIRST[usize::from(code)]);
        match Self::all().get(row) {
            None => &UNKNOWN,
            Some(row) if row.service_action.is_none() => row,
            Some(_) => {
                // If the CDB is too short for a service action, it's handled as an unknown service
                // action.
                let action = service_action(cdb);
                let unknown = match code {
                    block_32::VARIABLE_LENGTH => &UNKNOWN_LONG_ACTION,
                    _ => &UNKNOWN_ACTION,
                };
                with_code(code)
                    .find(|row| row.service_action.map(u16::from) == action)
                    .unwrap_or(unknown)
            }
        }
    }

    /// Returns the row for a CDB sent by an initiator. This may be a command that is not supported
    /// by our LUs.
    #[must_use]
    pub fn sent(cdb: &[u8]) -> &'static Self {
        let row = Self::of(cdb);
        let action = service_action(cdb);
        let is_sent = |row: &&Self| {
            cdb.first() == Some(&row.code) && row.service_action.map(u16::from) == action
        };
        match row.is_known() {
            true => row,
            false => table::FOREIGN.iter().find(is_sent).unwrap_or(row),
        }
    }

    /// Returns the row with the given name, used for constants.
    ///
    /// # Panics
    /// If no command has the given name.
    #[must_use]
    pub const fn named(name: &str) -> &'static Self {
        match find(&table::TABLE, name) {
            Some(row) => row,
            None => find(&table::FOREIGN, name).expect("unknown command name"),
        }
    }

    /// Creates a CDB for this command with all other fields set to zero.
    #[must_use]
    pub fn cdb(&self) -> Cdb {
        Cdb::new(self.code, self.service_action, &self.usage)
    }

    /// Returns whether a command is known not to change the medium or the state of the LU.
    #[must_use]
    pub fn changes_nothing(&self) -> bool {
        let changing = CommandFlags::WRITES
            | CommandFlags::CHANGES
            | CommandFlags::SETTINGS
            | CommandFlags::UNDER_RESERVE;
        !self.flags.intersects(changing)
    }

    /// Returns whether this is a row in the table.
    #[must_use]
    pub fn is_known(&self) -> bool {
        let unknown = [&UNKNOWN, &UNKNOWN_ACTION, &UNKNOWN_LONG_ACTION];
        !unknown.iter().any(|row| self.is(row))
    }

    /// Returns whether this is the given row.
    #[must_use]
    pub fn is(&self, row: &Self) -> bool {
        std::ptr::eq(self, row)
    }

    /// Returns the CDB usage bitmap for an LU without protection information, which has the same
    /// size as the CDB (SPC-4 6.35). A bit is set if we evaluate it, and must be zero in the CDB
    /// otherwise.
    #[must_use]
    pub fn usage(&self) -> &[u8] {
        self.usage.bytes()
    }

    /// Returns whether this command can be executed while a unit attention is pending.
    #[must_use]
    pub fn is_free_of_attention(&self) -> bool {
        self.flags.contains(CommandFlags::UNDER_ATTENTION)
    }

    /// Returns whether a CDB requests the names of an LU. This is an INQUIRY for the Unit Serial
    /// Number or Device Identification page (SPC-4 7.8), because the standard INQUIRY data cannot be
    /// used to identify an LU.
    #[must_use]
    pub fn requests_names(cdb: &[u8]) -> bool {
        const NAMES: [u8; 2] = [vpd::UNIT_SERIAL_NUMBER, vpd::DEVICE_IDENTIFICATION];
        cdb.first() == Some(&INQUIRY.code)
            && inquiry::EVPD.get(cdb) == Some(true)
            && inquiry::PAGE_CODE
                .get(cdb)
                .is_some_and(|page| NAMES.contains(&page))
    }

    /// Returns the sense data if this command is not supported by an LU.
    pub(crate) fn unsupported(&self) -> Sense {
        // All 32-byte CDBs are supported by the same LUs, so for other LUs the operation code is
        // unknown.
        if self.service_action.is_some() && !self.flags.contains(CommandFlags::TYPE_2) {
            INVALID_ACTION
        } else {
            INVALID_OPERATION_CODE
        }
    }

    /// Returns whether this command is supported by an LU.
    pub(crate) fn is_supported(&self, lu: &LogicalUnit) -> bool {
        let flags = self.flags & (CommandFlags::THIN | CommandFlags::TYPE_2);
        // Most commands are supported by all LUs.
        if flags.is_empty() {
            return true;
        }
        (!flags.contains(CommandFlags::THIN) || lu.config().is_thin())
            && (!flags.contains(CommandFlags::TYPE_2)
                || lu.protection().is_some_and(Protection::is_type_2))
    }

    /// Returns the protection of an LU, if this command has a field to select the checks.
    fn protection(&self, lu: &LogicalUnit) -> Option<Protection> {
        let has_field = self.flags.contains(CommandFlags::PROTECT);
        lu.protection().filter(|_| has_field)
    }

    /// Returns the usage bitmap for an LU.
    pub(crate) fn usage_for(&self, lu: &LogicalUnit) -> Usage {
        match self.protection(lu) {
            // With type 2 protection, the field is only used in 32-byte CDBs.
            Some(protection) if self.allows_protect(protection) => self.usage.with_protect(),
            _ => self.usage,
        }
    }

    /// Returns whether protection information can be transferred with this command.
    fn allows_protect(&self, protection: Protection) -> bool {
        !protection.is_type_2() || self.flags.contains(CommandFlags::TYPE_2)
    }

    /// Parses a CDB for an LU. See [`Cdb::parse`].
    pub(crate) fn parse(&self, received: &[u8], lu: &LogicalUnit) -> Result<Cdb, Sense> {
        match self.protection(lu) {
            None => Cdb::parse(received, &self.usage),
            Some(protection) => self.parse_protected(received, protection),
        }
    }

    #[inline(never)]
    fn parse_protected(&self, received: &[u8], protection: Protection) -> Result<Cdb, Sense> {
        let cdb = Cdb::parse(received, &self.usage.with_protect())?;
        let protect = cdb.protect();
        if protect > 0 && !self.allows_protect(protection) {
            return Err(INVALID_OPERATION_CODE);
        }
        if protect > PROTECT_MAX {
            return Err(Sense::cdb_field(cdb.flags_byte() as u16, Some(7)));
        }
        let is_long = self.flags.contains(CommandFlags::TYPE_2);
        if is_long && cdb.get(block_32::ADDITIONAL_LENGTH) != block_32::ADDITIONAL_LEN {
            let byte = block_32::ADDITIONAL_LENGTH.at();
            return Err(Sense::cdb_field(byte as u16, Some(7)));
        }
        Ok(cdb)
    }

    /// Returns the flags used to check for reservations. A START is always allowed (SPC-4 table
    /// 51).
    pub(crate) fn flags_under_reservation(&self, cdb: &[u8]) -> CommandFlags {
        // START is set, and POWER CONDITION is zero.
        let starts = cdb.get(4).is_some_and(|byte| byte & 0xf1 == 0x01);
        if starts && self.is(START_STOP_UNIT) {
            return self.flags - CommandFlags::CHANGES;
        }
        self.flags
    }

    /// Returns the task attribute to be used by the task set, for a command with the `received`
    /// attribute.
    #[must_use]
    pub fn task_attribute(&self, received: TaskAttribute) -> TaskAttribute {
        match self.flags.contains(CommandFlags::EXCLUSIVE) {
            true => TaskAttribute::Ordered,
            false => received,
        }
    }

    /// Returns the blocks that the command will change on the medium, used by the task set.
    #[must_use]
    pub fn footprint(&self, cdb: &[u8]) -> Footprint {
        // An atomic command can only conflict with a command that changes the medium.
        if !self.flags.contains(CommandFlags::WRITES) {
            return Footprint::None;
        }
        // A HEAD OF QUEUE command does not wait for the order, so this must also wait for the
        // blocks.
        if self.flags.contains(CommandFlags::EXCLUSIVE) {
            return Footprint::Atomic(Blocks::ALL);
        }
        let blocks = match self.kind {
            // The blocks for an UNMAP are in the parameter list.
            Kind::Unmap => Some(Blocks::ALL),
            _ => self.blocks(cdb),
        };
        match blocks {
            Some(blocks) if self.flags.contains(CommandFlags::ATOMIC) => Footprint::Atomic(blocks),
            Some(blocks) => Footprint::Writes(blocks),
            None => Footprint::None,
        }
    }

    /// Returns the blocks in a CDB. This is `None` if the command does not use any, or if the CDB
    /// is too short.
    #[must_use]
    pub fn blocks(&self, cdb: &[u8]) -> Option<Blocks> {
        if matches!(self.kind, Kind::Unmap | Kind::Other) {
            return None;
        }
        // Use a masked CDB here. This is called before the CDB is checked, so we can't return any
        // sense data.
        let extent = Cdb::masked(cdb, &self.usage)?.extent();
        Some(Blocks {
            first: extent.lba,
            // The LBA has not been checked against the capacity yet. If the sum would overflow, use
            // the maximum, so that this still overlaps with all possible blocks.
            end: extent.lba.saturating_add(extent.blocks),
        })
    }

    /// Returns the amount of data based on the CDB, so that it can be counted before the command is
    /// started. This is `None` if the command does not transfer any blocks. Note that VERIFY will
    /// read the blocks for any value of BYTCHK. WRITE SAME is assumed to write all of its blocks,
    /// even without data (NDOB) or with UNMAP, because the backend might not be able to unmap them.
    #[must_use]
    pub fn volume(&self, cdb: &[u8], block_size: u32) -> Option<Volume> {
        if matches!(self.kind, Kind::Flush | Kind::Other) {
            return None;
        }
        let cdb = Cdb::masked(cdb, &self.usage)?;
        let is_write = self.flags.contains(CommandFlags::WRITES);
        let repeats = self.flags.contains(CommandFlags::REPEATS);
        let block = u64::from(block_size);
        let bytes = match self.kind {
            Kind::Unmap => cdb.get(unmap::PARAMETER_LIST_LENGTH).into(),
            // COMPARE AND WRITE has data to compare and data to write.
            Kind::Compare if is_write => 2 * cdb.extent().blocks * block,
            _ => cdb.extent().blocks * block,
        };
        Some(Volume {
            is_write,
            bytes,
            // WRITE SAME only receives a single block for any number of blocks to write, so the
            // size of Data-Out is not a limit.
            is_sent: is_write && !repeats,
        })
    }
}

/// Returns the row with the given name, used for constants.
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

/// Compares two strings, used for constants.
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
    fn volume_counts_blocks_and_data() {
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
        // VERIFY (10), with and without data.
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
        // With UNMAP, with NDOB, and with both: if the medium can't unmap, all blocks are written.
        assert_eq!(volume(&same(0x08)), Some((true, 8 * 512)));
        assert_eq!(volume(&same(0x01)), Some((true, 8 * 512)));
        assert_eq!(volume(&same(0x09)), Some((true, 8 * 512)));
        let same = [0x41, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        assert_eq!(volume(&same), Some((true, 8 * 512)));
        let compare = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0];
        assert_eq!(volume(&compare), Some((true, 6 * 512)));
        // TEST UNIT READY, SYNCHRONIZE CACHE (10), a CDB that is too short, and an unknown command.
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
            // The length is based on the group code in bits 7 to 5 (SPC-4 4.2.5.1).
            let len = match entry.code >> 5 {
                0 => 6,
                1 | 2 => 10,
                3 => 32,
                4 => 16,
                5 => 12,
                group => panic!("group {group} has no fixed length"),
            };
            assert_eq!(entry.usage().len(), len, "{}", entry.name);
            assert_eq!(entry.usage()[0], entry.code, "{}", entry.name);
            let mut cdb = vec![0; len];
            cdb[0] = entry.code;
            let action_byte = if len == 32 { 9 } else { 1 };
            cdb[action_byte] = entry.service_action.unwrap_or(0);
            assert!(Opcode::of(&cdb).is(entry), "{}", entry.name);
            assert_eq!(entry.kind, kind_of(entry.name), "{}", entry.name);
        }
        assert_eq!(UNKNOWN.kind, Kind::Other);
    }

    /// Returns the expected type for a command name. This is used for metrics, so no other test
    /// would detect an invalid type.
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
    fn initiator_table_includes_foreign_commands() {
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
    fn state_changing_commands_are_complete() {
        let changing = Opcode::all().iter().filter(|row| !row.changes_nothing());
        #[rustfmt::skip]
        assert_eq!(changing.map(|row| row.name).collect::<Vec<_>>(), [
            "FORMAT UNIT", "WRITE (6)", "MODE SELECT (6)", "RESERVE (6)", "RELEASE (6)", "START STOP UNIT",
            "WRITE (10)", "WRITE AND VERIFY (10)", "SYNCHRONIZE CACHE (10)", "WRITE SAME (10)",
            "UNMAP", "MODE SELECT (10)", "RESERVE (10)", "RELEASE (10)",
            "PERSISTENT RESERVE OUT, REGISTER", "PERSISTENT RESERVE OUT, RESERVE",
            "PERSISTENT RESERVE OUT, RELEASE", "PERSISTENT RESERVE OUT, CLEAR",
            "PERSISTENT RESERVE OUT, PREEMPT", "PERSISTENT RESERVE OUT, PREEMPT AND ABORT",
            "PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY",
            "WRITE (32)", "WRITE AND VERIFY (32)", "WRITE SAME (32)",
            "COMPARE AND WRITE", "WRITE (16)", "ORWRITE (16)", "WRITE AND VERIFY (16)",
            "SYNCHRONIZE CACHE (16)", "WRITE SAME (16)", "WRITE (12)", "WRITE AND VERIFY (12)",
        ]);
        assert!(!UNKNOWN.changes_nothing() && !UNKNOWN_ACTION.changes_nothing());
    }

    #[test]
    fn unknown_opcodes_and_actions_differ() {
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
