//! The opcode table: what commands there are.
//!
//! One row per command, or per service action, says everything general about
//! it: name, CDB length and usage bitmap, direction, what must hold before it
//! may run, the recommended timeout, and the function that plans it. The same
//! rows refuse reserved bits and answer REPORT SUPPORTED OPERATION CODES, so
//! what is reported cannot differ from what is done.
//!
//! A bit of the usage bitmap is one if we evaluate it. A bit that is zero in
//! the bitmap must be zero in the CDB: fields that we do not support (RDPROTECT,
//! GROUP NUMBER, ANCHOR, NACA and the like) are refused by that rule alone.
//! Obsolete bits that old initiators still set (FUA_NV, SYNC_NV) are allowed.

use bitflags::bitflags;

use crate::cdb::Cdb;
use crate::kind::Kind;
use crate::plan::PlanFn;
use crate::sense::{AdditionalSense, Sense};
use crate::task::{Blocks, Footprint};
use crate::{
    atomic, capacity, inquiry, mode, mode_select, provisioning, report, reserve, rw, unit, verify,
};

/// INQUIRY.
pub const INQUIRY: u8 = 0x12;
/// REQUEST SENSE.
pub(crate) const REQUEST_SENSE: u8 = 0x03;
/// START STOP UNIT.
pub(crate) const START_STOP_UNIT: u8 = 0x1b;
/// REPORT LUNS.
pub(crate) const REPORT_LUNS: u8 = 0xa0;
/// PERSISTENT RESERVE IN.
pub(crate) const PERSISTENT_RESERVE_IN: u8 = 0x5e;

/// UNMAP.
const UNMAP: u8 = 0x42;
/// WRITE SAME (10).
const WRITE_SAME_10: u8 = 0x41;
/// WRITE SAME (16).
const WRITE_SAME_16: u8 = 0x93;
/// COMPARE AND WRITE.
const COMPARE_AND_WRITE: u8 = 0x89;

/// Where the service action is in byte 1.
pub(crate) const ACTION_MASK: u8 = 0x1f;

/// Which way a command's data go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// There are none.
    None,
    /// From the logical unit to the initiator.
    In,
    /// From the initiator to the logical unit.
    Out,
}

/// How much a command is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Volume {
    /// Whether it changes the medium.
    pub is_write: bool,
    /// Bytes that it reads from the medium, takes from the initiator, or writes many times.
    pub bytes: u64,
    /// Whether they come from the initiator.
    pub is_sent: bool,
}

bitflags! {
    /// What must hold before a command may run.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct Gates: u16 {
        /// Runs although a unit attention is pending.
        const UNDER_ATTENTION = 1 << 0;
        /// The unit must be started.
        const READY = 1 << 1;
        /// The medium must be writable.
        const WRITES = 1 << 2;
        /// Exists on thin provisioned units only.
        const THIN = 1 << 3;
        /// What it does depends on what it finds on the medium, which nothing else may change
        /// meanwhile.
        const ATOMIC = 1 << 4;
        /// Runs although another nexus has the unit by RESERVE.
        const UNDER_RESERVATION = 1 << 5;
        /// Forbidden to others where somebody has exclusive access.
        const READS = 1 << 6;
        /// As [`Self::WRITES`], where it is about reservations.
        const CHANGES = 1 << 7;
        /// Changes the state of the unit, or its reservations, for every nexus. Refused through a read-only
        /// LUN, although the medium need not be writable: an initiator that may not write must not block
        /// those that may. (SPC-4 lets a write-protected medium be reserved, but says nothing of numbers.)
        const SETTINGS = 1 << 8;
    }
}

/// One row of the table.
#[derive(Debug)]
pub struct Opcode {
    /// OPERATION CODE.
    pub opcode: u8,
    /// SERVICE ACTION, for opcodes that have them.
    pub service_action: Option<u16>,
    /// The command's name in its standard.
    pub name: &'static str,
    /// CDB usage bitmap, as long as the CDB.
    pub usage: &'static [u8],
    /// Which way data go.
    pub direction: Direction,
    /// Recommended command timeout in seconds.
    pub timeout: u32,
    pub(crate) gates: Gates,
    pub(crate) plan: PlanFn,
}

/// Every command, in ascending order of opcodes and service actions.
pub static TABLE: [Opcode; 54] = [
    Opcode {
        opcode: 0x00,
        service_action: None,
        name: "TEST UNIT READY",
        usage: &[0x00, 0x00, 0x00, 0x00, 0x00, 0x00],
        direction: Direction::None,
        timeout: 30,
        gates: Gates::READY,
        plan: unit::plan_test_unit_ready,
    },
    Opcode {
        opcode: 0x03,
        service_action: None,
        name: "REQUEST SENSE",
        usage: &[0x03, 0x01, 0x00, 0x00, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::UNDER_ATTENTION,
        plan: unit::plan_request_sense,
    },
    Opcode {
        opcode: 0x08,
        service_action: None,
        name: "READ (6)",
        usage: &[0x08, 0x1f, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: rw::plan_read,
    },
    Opcode {
        opcode: 0x0a,
        service_action: None,
        name: "WRITE (6)",
        usage: &[0x0a, 0x1f, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::WRITES),
        plan: rw::plan_write,
    },
    Opcode {
        opcode: 0x12,
        service_action: None,
        name: "INQUIRY",
        usage: &[0x12, 0x01, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::UNDER_ATTENTION,
        plan: inquiry::plan_inquiry,
    },
    Opcode {
        opcode: 0x15,
        service_action: None,
        name: "MODE SELECT (6)",
        usage: &[0x15, 0x10, 0x00, 0x00, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::CHANGES.union(Gates::SETTINGS),
        plan: mode_select::plan_mode_select_6,
    },
    Opcode {
        opcode: 0x16,
        service_action: None,
        name: "RESERVE (6)",
        usage: &[0x16, 0x00, 0x00, 0x00, 0x00, 0x00],
        direction: Direction::None,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve,
    },
    Opcode {
        opcode: 0x17,
        service_action: None,
        name: "RELEASE (6)",
        usage: &[0x17, 0x00, 0x00, 0x00, 0x00, 0x00],
        direction: Direction::None,
        timeout: 30,
        gates: Gates::UNDER_RESERVATION,
        plan: reserve::plan_release,
    },
    Opcode {
        opcode: 0x1a,
        service_action: None,
        name: "MODE SENSE (6)",
        usage: &[0x1a, 0x08, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READS,
        plan: mode::plan_mode_sense_6,
    },
    Opcode {
        opcode: 0x1b,
        service_action: None,
        name: "START STOP UNIT",
        usage: &[0x1b, 0x01, 0x00, 0x00, 0xf5, 0x00],
        direction: Direction::None,
        timeout: 60,
        gates: Gates::CHANGES.union(Gates::SETTINGS),
        plan: unit::plan_start_stop_unit,
    },
    Opcode {
        opcode: 0x25,
        service_action: None,
        name: "READ CAPACITY (10)",
        usage: &[0x25, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY,
        plan: capacity::plan_read_capacity_10,
    },
    Opcode {
        opcode: 0x28,
        service_action: None,
        name: "READ (10)",
        usage: &[0x28, 0x1a, 0xff, 0xff, 0xff, 0xff, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: rw::plan_read,
    },
    Opcode {
        opcode: 0x2a,
        service_action: None,
        name: "WRITE (10)",
        usage: &[0x2a, 0x1a, 0xff, 0xff, 0xff, 0xff, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::WRITES),
        plan: rw::plan_write,
    },
    Opcode {
        opcode: 0x2e,
        service_action: None,
        name: "WRITE AND VERIFY (10)",
        usage: &[0x2e, 0x16, 0xff, 0xff, 0xff, 0xff, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::WRITES),
        plan: rw::plan_write_and_verify,
    },
    Opcode {
        opcode: 0x2f,
        service_action: None,
        name: "VERIFY (10)",
        usage: &[0x2f, 0x16, 0xff, 0xff, 0xff, 0xff, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: verify::plan_verify,
    },
    Opcode {
        opcode: 0x34,
        service_action: None,
        name: "PRE-FETCH (10)",
        usage: &[0x34, 0x02, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x00],
        direction: Direction::None,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: unit::plan_prefetch,
    },
    Opcode {
        opcode: 0x35,
        service_action: None,
        name: "SYNCHRONIZE CACHE (10)",
        usage: &[0x35, 0x06, 0xff, 0xff, 0xff, 0xff, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::None,
        timeout: 60,
        gates: Gates::READY.union(Gates::CHANGES),
        plan: unit::plan_synchronize_cache,
    },
    Opcode {
        opcode: 0x37,
        service_action: None,
        name: "READ DEFECT DATA (10)",
        usage: &[0x37, 0x00, 0x1f, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: report::plan_defects_10,
    },
    Opcode {
        opcode: 0x41,
        service_action: None,
        name: "WRITE SAME (10)",
        usage: &[0x41, 0x08, 0xff, 0xff, 0xff, 0xff, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 120,
        gates: Gates::READY.union(Gates::WRITES),
        plan: provisioning::plan_write_same,
    },
    Opcode {
        opcode: 0x42,
        service_action: None,
        name: "UNMAP",
        usage: &[0x42, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 120,
        gates: Gates::READY.union(Gates::WRITES).union(Gates::THIN),
        plan: provisioning::plan_unmap,
    },
    Opcode {
        opcode: 0x55,
        service_action: None,
        name: "MODE SELECT (10)",
        usage: &[0x55, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::CHANGES.union(Gates::SETTINGS),
        plan: mode_select::plan_mode_select_10,
    },
    Opcode {
        opcode: 0x56,
        service_action: None,
        name: "RESERVE (10)",
        usage: &[0x56, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00],
        direction: Direction::None,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve,
    },
    Opcode {
        opcode: 0x57,
        service_action: None,
        name: "RELEASE (10)",
        usage: &[0x57, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00],
        direction: Direction::None,
        timeout: 30,
        gates: Gates::UNDER_RESERVATION,
        plan: reserve::plan_release,
    },
    Opcode {
        opcode: 0x5a,
        service_action: None,
        name: "MODE SENSE (10)",
        usage: &[0x5a, 0x18, 0xff, 0xff, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READS,
        plan: mode::plan_mode_sense_10,
    },
    Opcode {
        opcode: 0x5e,
        service_action: Some(0x00),
        name: "PERSISTENT RESERVE IN, READ KEYS",
        usage: &[0x5e, 0x1f, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::empty(),
        plan: reserve::plan_reserve_in,
    },
    Opcode {
        opcode: 0x5e,
        service_action: Some(0x01),
        name: "PERSISTENT RESERVE IN, READ RESERVATION",
        usage: &[0x5e, 0x1f, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::empty(),
        plan: reserve::plan_reserve_in,
    },
    Opcode {
        opcode: 0x5e,
        service_action: Some(0x02),
        name: "PERSISTENT RESERVE IN, REPORT CAPABILITIES",
        usage: &[0x5e, 0x1f, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::empty(),
        plan: reserve::plan_reserve_in,
    },
    Opcode {
        opcode: 0x5e,
        service_action: Some(0x03),
        name: "PERSISTENT RESERVE IN, READ FULL STATUS",
        usage: &[0x5e, 0x1f, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::empty(),
        plan: reserve::plan_reserve_in,
    },
    Opcode {
        opcode: 0x5f,
        service_action: Some(0x00),
        name: "PERSISTENT RESERVE OUT, REGISTER",
        usage: &[0x5f, 0x1f, 0xff, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve_out,
    },
    Opcode {
        opcode: 0x5f,
        service_action: Some(0x01),
        name: "PERSISTENT RESERVE OUT, RESERVE",
        usage: &[0x5f, 0x1f, 0xff, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve_out,
    },
    Opcode {
        opcode: 0x5f,
        service_action: Some(0x02),
        name: "PERSISTENT RESERVE OUT, RELEASE",
        usage: &[0x5f, 0x1f, 0xff, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve_out,
    },
    Opcode {
        opcode: 0x5f,
        service_action: Some(0x03),
        name: "PERSISTENT RESERVE OUT, CLEAR",
        usage: &[0x5f, 0x1f, 0xff, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve_out,
    },
    Opcode {
        opcode: 0x5f,
        service_action: Some(0x04),
        name: "PERSISTENT RESERVE OUT, PREEMPT",
        usage: &[0x5f, 0x1f, 0xff, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve_out,
    },
    Opcode {
        opcode: 0x5f,
        service_action: Some(0x05),
        name: "PERSISTENT RESERVE OUT, PREEMPT AND ABORT",
        usage: &[0x5f, 0x1f, 0xff, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve_out,
    },
    Opcode {
        opcode: 0x5f,
        service_action: Some(0x06),
        name: "PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY",
        usage: &[0x5f, 0x1f, 0xff, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::SETTINGS,
        plan: reserve::plan_reserve_out,
    },
    Opcode {
        opcode: 0x88,
        service_action: None,
        name: "READ (16)",
        usage: &[
            0x88, 0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: rw::plan_read,
    },
    Opcode {
        opcode: 0x89,
        service_action: None,
        name: "COMPARE AND WRITE",
        usage: &[
            0x89, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00, 0x00, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 60,
        gates: Gates::READY.union(Gates::WRITES).union(Gates::ATOMIC),
        plan: atomic::plan_compare_and_write,
    },
    Opcode {
        opcode: 0x8a,
        service_action: None,
        name: "WRITE (16)",
        usage: &[
            0x8a, 0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::WRITES),
        plan: rw::plan_write,
    },
    Opcode {
        opcode: 0x8b,
        service_action: None,
        name: "ORWRITE (16)",
        usage: &[
            0x8b, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 60,
        gates: Gates::READY.union(Gates::WRITES).union(Gates::ATOMIC),
        plan: atomic::plan_or_write,
    },
    Opcode {
        opcode: 0x8e,
        service_action: None,
        name: "WRITE AND VERIFY (16)",
        usage: &[
            0x8e, 0x16, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::WRITES),
        plan: rw::plan_write_and_verify,
    },
    Opcode {
        opcode: 0x8f,
        service_action: None,
        name: "VERIFY (16)",
        usage: &[
            0x8f, 0x16, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: verify::plan_verify,
    },
    Opcode {
        opcode: 0x90,
        service_action: None,
        name: "PRE-FETCH (16)",
        usage: &[
            0x90, 0x02, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x1f, 0x00,
        ],
        direction: Direction::None,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: unit::plan_prefetch,
    },
    Opcode {
        opcode: 0x91,
        service_action: None,
        name: "SYNCHRONIZE CACHE (16)",
        usage: &[
            0x91, 0x06, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::None,
        timeout: 60,
        gates: Gates::READY.union(Gates::CHANGES),
        plan: unit::plan_synchronize_cache,
    },
    Opcode {
        opcode: 0x93,
        service_action: None,
        name: "WRITE SAME (16)",
        usage: &[
            0x93, 0x09, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 120,
        gates: Gates::READY.union(Gates::WRITES),
        plan: provisioning::plan_write_same,
    },
    Opcode {
        opcode: 0x9e,
        service_action: Some(0x10),
        name: "READ CAPACITY (16)",
        usage: &[
            0x9e, 0x1f, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY,
        plan: capacity::plan_read_capacity_16,
    },
    Opcode {
        opcode: 0x9e,
        service_action: Some(0x12),
        name: "GET LBA STATUS",
        usage: &[
            0x9e, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY.union(Gates::THIN).union(Gates::READS),
        plan: provisioning::plan_get_lba_status,
    },
    Opcode {
        opcode: 0xa0,
        service_action: None,
        name: "REPORT LUNS",
        usage: &[
            0xa0, 0x00, 0xff, 0x00, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::UNDER_ATTENTION,
        plan: unit::plan_report_luns,
    },
    Opcode {
        opcode: 0xa3,
        service_action: Some(0x0c),
        name: "REPORT SUPPORTED OPERATION CODES",
        usage: &[
            0xa3, 0x1f, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::empty(),
        plan: report::plan_opcodes,
    },
    Opcode {
        opcode: 0xa3,
        service_action: Some(0x0d),
        name: "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS",
        usage: &[
            0xa3, 0x1f, 0x80, 0x00, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::empty(),
        plan: report::plan_task_functions,
    },
    Opcode {
        opcode: 0xa8,
        service_action: None,
        name: "READ (12)",
        usage: &[
            0xa8, 0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: rw::plan_read,
    },
    Opcode {
        opcode: 0xaa,
        service_action: None,
        name: "WRITE (12)",
        usage: &[
            0xaa, 0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::WRITES),
        plan: rw::plan_write,
    },
    Opcode {
        opcode: 0xae,
        service_action: None,
        name: "WRITE AND VERIFY (12)",
        usage: &[
            0xae, 0x16, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::WRITES),
        plan: rw::plan_write_and_verify,
    },
    Opcode {
        opcode: 0xaf,
        service_action: None,
        name: "VERIFY (12)",
        usage: &[
            0xaf, 0x16, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::Out,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: verify::plan_verify,
    },
    Opcode {
        opcode: 0xb7,
        service_action: None,
        name: "READ DEFECT DATA (12)",
        usage: &[
            0xb7, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00, 0x00,
        ],
        direction: Direction::In,
        timeout: 30,
        gates: Gates::READY.union(Gates::READS),
        plan: report::plan_defects_12,
    },
];

/// Row at which each opcode starts; `NO_ROW` where there is none.
static FIRST: [u8; 256] = {
    let mut first = [NO_ROW; 256];
    let mut row = TABLE.len();
    while row > 0 {
        row -= 1;
        first[TABLE[row].opcode as usize] = row as u8;
    }
    first
};

const NO_ROW: u8 = u8::MAX;

/// All rows of an operation code.
pub(crate) fn with_code(code: u8) -> impl Iterator<Item = &'static Opcode> {
    let first = usize::from(FIRST[usize::from(code)]);
    TABLE
        .get(first..)
        .unwrap_or_default()
        .iter()
        .take_while(move |entry| entry.opcode == code)
}

/// Finds the row of a CDB.
///
/// # Errors
///
/// INVALID COMMAND OPERATION CODE; or INVALID FIELD IN CDB at the service
/// action, where only that is unknown.
pub(crate) fn find(cdb: &[u8]) -> Result<&'static Opcode, Sense> {
    let invalid = Sense::illegal(AdditionalSense::INVALID_OPERATION_CODE);
    let code = *cdb.first().ok_or(invalid)?;
    let mut rows = with_code(code).peekable();
    let first = rows.peek().ok_or(invalid)?;
    if first.service_action.is_none() {
        return Ok(first);
    }
    let action = cdb.get(1).map(|byte| u16::from(byte & ACTION_MASK));
    rows.find(|entry| entry.service_action == action)
        .ok_or(INVALID_ACTION)
}

const INVALID_ACTION: Sense = Sense::cdb_field(1, Some(4));

/// Whether a CDB's command runs although a unit attention is pending.
#[must_use]
pub fn is_free_of_attention(cdb: &[u8]) -> bool {
    cdb.first()
        .and_then(|&code| with_code(code).next())
        .is_some_and(|entry| entry.gates.contains(Gates::UNDER_ATTENTION))
}

/// Whether a CDB asks for the names of the unit: INQUIRY of the page Unit Serial Number or Device Identification
/// (SPC-4 7.8). Standard INQUIRY data do not tell units apart.
#[must_use]
pub fn asks_for_names(cdb: &[u8]) -> bool {
    const EVPD: u8 = 1;
    const SERIAL: u8 = 0x80;
    const IDENTIFICATION: u8 = 0x83;
    matches!(cdb, [INQUIRY, flags, SERIAL | IDENTIFICATION, ..] if flags & EVPD != 0)
}

impl Opcode {
    /// The sense of a command that this unit does not offer.
    pub(crate) fn unsupported(&self) -> Sense {
        if self.service_action.is_some() {
            INVALID_ACTION
        } else {
            Sense::illegal(AdditionalSense::INVALID_OPERATION_CODE)
        }
    }

    /// The gates of a CDB, as far as reservations look at them. Everyone may start a unit
    /// (SPC-4 table 51).
    pub(crate) fn gates_of(&self, cdb: &[u8]) -> Gates {
        let starts = cdb.get(4).is_some_and(|byte| byte & 0xf1 == 0x01);
        if self.opcode == START_STOP_UNIT && starts {
            return self.gates - Gates::CHANGES;
        }
        self.gates
    }

    /// The row of a CDB, for logs and counters; nothing for an unknown command.
    #[must_use]
    pub fn of(cdb: &[u8]) -> Option<&'static Self> {
        find(cdb).ok()
    }

    /// What a command changes on the medium, for the task set; nothing for an unknown one.
    #[must_use]
    pub fn footprint_of(cdb: &[u8]) -> Footprint {
        let Ok(entry) = find(cdb) else {
            return Footprint::None;
        };
        let is_atomic = entry.gates.contains(Gates::ATOMIC);
        let blocks = match entry.opcode {
            // The blocks of an UNMAP are in its data.
            UNMAP => Some(Blocks::ALL),
            _ if entry.gates.contains(Gates::WRITES) => {
                let cdb = Cdb::new(cdb, entry.usage.len());
                cdb.ok().map(|cdb| {
                    let extent = cdb.extent();
                    Blocks {
                        first: extent.lba,
                        end: extent.lba.saturating_add(extent.blocks),
                    }
                })
            }
            _ => None,
        };
        match blocks {
            Some(blocks) if is_atomic => Footprint::Atomic(blocks),
            Some(blocks) => Footprint::Writes(blocks),
            None => Footprint::None,
        }
    }

    /// What a command reads, takes or writes, for those who count it before it starts, by its CDB alone; nothing for
    /// one that is not about blocks. VERIFY reads its blocks, whatever its BYTCHK says. WRITE SAME writes all of its
    /// blocks, unless it has none to write (NDOB) and is to unmap them: one that has a block may find that it cannot
    /// unmap.
    #[must_use]
    pub fn volume_of(cdb: &[u8], block_size: u32) -> Option<Volume> {
        let kind = Kind::of(cdb);
        if matches!(kind, Kind::Flush | Kind::Other) {
            return None;
        }
        let entry = find(cdb).ok()?;
        let is_write = entry.gates.contains(Gates::WRITES);
        let cdb = Cdb::new(cdb, entry.usage.len()).ok()?;
        let block = u64::from(block_size);
        let bytes = match entry.opcode {
            UNMAP => cdb.be16(7).into(),
            WRITE_SAME_16 if cdb.bit(1, 0) && cdb.bit(1, 3) => block,
            // What is compared, and what is written.
            COMPARE_AND_WRITE => 2 * u64::from(cdb.byte(13)) * block,
            _ => cdb.extent().blocks * block,
        };
        let is_same = matches!(entry.opcode, WRITE_SAME_10 | WRITE_SAME_16);
        Some(Volume {
            is_write,
            bytes,
            is_sent: is_write && !is_same,
        })
    }

    /// The command's direction, for a transport that must know before the
    /// logical unit does; nothing for an unknown command.
    #[must_use]
    pub fn direction_of(cdb: &[u8]) -> Option<Direction> {
        find(cdb).ok().map(|entry| entry.direction)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_those_of_blocks_and_of_data_that_are_taken() {
        let volume = |cdb: &[u8]| Opcode::volume_of(cdb, 512).map(|v| (v.is_write, v.bytes));
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
        for pair in TABLE.windows(2) {
            let key = |entry: &Opcode| (entry.opcode, entry.service_action);
            assert!(key(&pair[0]) < key(&pair[1]), "{}", pair[1].name);
        }
        for entry in &TABLE {
            // SPC-4 4.2.5.1: the group code in bits 7 to 5 gives the length.
            let len = match entry.opcode >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                5 => 12,
                group => panic!("group {group} has no fixed length"),
            };
            assert_eq!(entry.usage.len(), len, "{}", entry.name);
            assert_eq!(entry.usage[0], entry.opcode, "{}", entry.name);
            let mut cdb = vec![0; len];
            cdb[0] = entry.opcode;
            cdb[1] = entry.service_action.unwrap_or(0) as u8;
            assert_eq!(find(&cdb).unwrap().name, entry.name);
        }
    }

    #[test]
    fn unknown_codes_and_actions_are_told_apart() {
        let invalid = Err(Sense::illegal(AdditionalSense::INVALID_OPERATION_CODE));
        let sense = |cdb: &[u8]| find(cdb).map(|entry| entry.name);
        assert_eq!(sense(&[]), invalid);
        assert_eq!(sense(&[0xff]), invalid);
        assert_eq!(sense(&[0x9e, 0x11]), Err(Sense::cdb_field(1, Some(4))));
        assert_eq!(sense(&[0x9e]), Err(Sense::cdb_field(1, Some(4))));
        assert_eq!(Opcode::of(&[0x93]).unwrap().name, "WRITE SAME (16)");
        assert!(Opcode::of(&[0x9e, 0x1f]).is_none());
        assert_eq!(Opcode::direction_of(&[0x2a]), Some(Direction::Out));
    }
}
