//! The rows of the opcode table.

use super::report;
use super::{Direction, Kind, Opcode};
use crate::cdb::Usage;
use crate::commands::{
    cache, capacity, compare_and_write, defects, format_unit, inquiry, lba_status, mode_select,
    mode_sense, or_write, persistent_reserve, read_write, report_luns, reserve, unit_state, unmap,
    verify, write_same,
};
use crate::flags::CommandFlags;

/// Creates the table, with one command per line.
macro_rules! table {
    (action) => { None };
    (action $action:literal) => { Some($action) };
    ($(
        $code:literal $(/ $action:literal)? $direction:ident $timeout:literal $kind:ident
        [$($flag:ident)|*] $family:ident::$plan:ident $usage:literal $name:literal;
    )*) => {
        [$(Opcode {
            code: $code,
            service_action: table!(action $($action)?),
            name: $name,
            usage: Usage::new($code, $usage),
            direction: Direction::$direction,
            timeout: $timeout,
            kind: Kind::$kind,
            flags: CommandFlags::empty()$(.union(CommandFlags::$flag))*,
            plan: $family::$plan,
        }),*]
    };
}

/// All commands, sorted by operation code and service action.
///
/// Columns: operation code and service action, data direction, recommended command timeout in
/// seconds, type, flags, planning function, CDB usage after the operation code, and the name in the
/// standard.
///
/// This must be an array rather than a slice, because rows are compared by address, which has to be
/// unique.
pub(super) static TABLE: [Opcode; 60] = table! {
    0x00      None  30 Other   [READY]             unit_state::plan_test_unit_ready          "00 0000 00 00"                      "TEST UNIT READY";
    0x03      In    30 Other   [UNDER_ATTENTION]   unit_state::plan_request_sense            "01 0000 ff 00"                      "REQUEST SENSE";
    0x04      Out 3600 Other   [READY|WRITES|EXCLUSIVE] format_unit::plan_format_unit        "ff 00 0000 00"                      "FORMAT UNIT";
    0x08      In    30 Read    [READY|READS]       read_write::plan_read                     "1f ffff ff 00"                      "READ (6)";
    0x0a      Out   30 Write   [READY|WRITES]      read_write::plan_write                    "1f ffff ff 00"                      "WRITE (6)";
    0x12      In    30 Other   [UNDER_ATTENTION]   inquiry::plan_inquiry                     "01 ff ffff 00"                      "INQUIRY";
    0x15      Out   30 Other   [CHANGES|SETTINGS]  mode_select::plan_mode_select_6           "10 0000 ff 00"                      "MODE SELECT (6)";
    0x16      None  30 Other   [SETTINGS]          reserve::plan_reserve                     "00 0000 00 00"                      "RESERVE (6)";
    0x17      None  30 Other   [UNDER_RESERVE]     reserve::plan_release                     "00 0000 00 00"                      "RELEASE (6)";
    0x1a      In    30 Other   [READS]             mode_sense::plan_mode_sense_6             "08 ffff ff 00"                      "MODE SENSE (6)";
    0x1b      None  60 Other   [CHANGES|SETTINGS]  unit_state::plan_start_stop_unit          "01 0000 f5 00"                      "START STOP UNIT";
    0x25      In    30 Other   [READY]             capacity::plan_read_capacity_10           "00 00000000 00 0000 00"             "READ CAPACITY (10)";
    0x28      In    30 Read    [READY|READS|PROTECT] read_write::plan_read                   "1a ffffffff 00 ffff 00"             "READ (10)";
    0x2a      Out   30 Write   [READY|WRITES|PROTECT] read_write::plan_write                 "1a ffffffff 00 ffff 00"             "WRITE (10)";
    0x2e      Out   30 Write   [READY|WRITES|PROTECT] read_write::plan_write_and_verify      "16 ffffffff 00 ffff 00"             "WRITE AND VERIFY (10)";
    0x2f      Out   30 Compare [READY|READS|PROTECT] verify::plan_verify                     "16 ffffffff 00 ffff 00"             "VERIFY (10)";
    0x34      None  30 Other   [READY|READS]       cache::plan_prefetch                      "02 ffffffff 1f ffff 00"             "PRE-FETCH (10)";
    0x35      None  60 Flush   [READY|CHANGES]     cache::plan_synchronize_cache             "06 ffffffff 00 ffff 00"             "SYNCHRONIZE CACHE (10)";
    0x37      In    30 Other   [READY|READS]       defects::plan_defects_10                  "00 1f 00000000 ffff 00"             "READ DEFECT DATA (10)";
    0x41      Out  120 Write   [READY|WRITES|REPEATS|PROTECT] write_same::plan_write_same    "08 ffffffff 00 ffff 00"             "WRITE SAME (10)";
    0x42      Out  120 Unmap   [READY|WRITES|THIN] unmap::plan_unmap                         "00 00000000 00 ffff 00"             "UNMAP";
    0x55      Out   30 Other   [CHANGES|SETTINGS]  mode_select::plan_mode_select_10          "10 0000000000 ffff 00"              "MODE SELECT (10)";
    0x56      None  30 Other   [SETTINGS]          reserve::plan_reserve                     "00 00000000 00 0000 00"             "RESERVE (10)";
    0x57      None  30 Other   [UNDER_RESERVE]     reserve::plan_release                     "00 00000000 00 0000 00"             "RELEASE (10)";
    0x5a      In    30 Other   [READS]             mode_sense::plan_mode_sense_10            "18 ffff 000000 ffff 00"             "MODE SENSE (10)";
    0x5e/0x00 In    30 Other   [RESERVATIONS]      persistent_reserve::plan_in               "1f 0000000000 ffff 00"              "PERSISTENT RESERVE IN, READ KEYS";
    0x5e/0x01 In    30 Other   [RESERVATIONS]      persistent_reserve::plan_in               "1f 0000000000 ffff 00"              "PERSISTENT RESERVE IN, READ RESERVATION";
    0x5e/0x02 In    30 Other   [RESERVATIONS]      persistent_reserve::plan_in               "1f 0000000000 ffff 00"              "PERSISTENT RESERVE IN, REPORT CAPABILITIES";
    0x5e/0x03 In    30 Other   [RESERVATIONS]      persistent_reserve::plan_in               "1f 0000000000 ffff 00"              "PERSISTENT RESERVE IN, READ FULL STATUS";
    0x5f/0x00 Out   30 Other   [SETTINGS|RESERVATIONS] persistent_reserve::plan_out         "1f ff 0000 ffffffff 00"             "PERSISTENT RESERVE OUT, REGISTER";
    0x5f/0x01 Out   30 Other   [SETTINGS|RESERVATIONS] persistent_reserve::plan_out         "1f ff 0000 ffffffff 00"             "PERSISTENT RESERVE OUT, RESERVE";
    0x5f/0x02 Out   30 Other   [SETTINGS|RESERVATIONS] persistent_reserve::plan_out         "1f ff 0000 ffffffff 00"             "PERSISTENT RESERVE OUT, RELEASE";
    0x5f/0x03 Out   30 Other   [SETTINGS|RESERVATIONS] persistent_reserve::plan_out         "1f ff 0000 ffffffff 00"             "PERSISTENT RESERVE OUT, CLEAR";
    0x5f/0x04 Out   30 Other   [SETTINGS|RESERVATIONS] persistent_reserve::plan_out         "1f ff 0000 ffffffff 00"             "PERSISTENT RESERVE OUT, PREEMPT";
    0x5f/0x05 Out   30 Other   [SETTINGS|RESERVATIONS] persistent_reserve::plan_out         "1f ff 0000 ffffffff 00"             "PERSISTENT RESERVE OUT, PREEMPT AND ABORT";
    0x5f/0x06 Out   30 Other   [SETTINGS|RESERVATIONS] persistent_reserve::plan_out         "1f ff 0000 ffffffff 00"             "PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY";
    0x7f/0x09 In    30 Read    [READY|READS|PROTECT|TYPE_2] read_write::plan_read              "00 00000000 00 18 ffff 1a 00 ffffffffffffffff ffffffff ffff ffff ffffffff" "READ (32)";
    0x7f/0x0a Out   30 Compare [READY|READS|PROTECT|TYPE_2] verify::plan_verify                "00 00000000 00 18 ffff 16 00 ffffffffffffffff ffffffff ffff ffff ffffffff" "VERIFY (32)";
    0x7f/0x0b Out   30 Write   [READY|WRITES|PROTECT|TYPE_2] read_write::plan_write            "00 00000000 00 18 ffff 1a 00 ffffffffffffffff ffffffff ffff ffff ffffffff" "WRITE (32)";
    0x7f/0x0c Out   30 Write   [READY|WRITES|PROTECT|TYPE_2] read_write::plan_write_and_verify "00 00000000 00 18 ffff 16 00 ffffffffffffffff ffffffff ffff ffff ffffffff" "WRITE AND VERIFY (32)";
    0x7f/0x0d Out  120 Write   [READY|WRITES|REPEATS|PROTECT|TYPE_2] write_same::plan_write_same "00 00000000 00 18 ffff 09 00 ffffffffffffffff ffffffff ffff ffff ffffffff" "WRITE SAME (32)";
    0x88      In    30 Read    [READY|READS|PROTECT] read_write::plan_read                   "1a ffffffffffffffff ffffffff 00 00" "READ (16)";
    0x89      Out   60 Compare [READY|WRITES|ATOMIC|PROTECT] compare_and_write::plan_compare_and_write "18 ffffffffffffffff 000000ff 00 00" "COMPARE AND WRITE";
    0x8a      Out   30 Write   [READY|WRITES|PROTECT] read_write::plan_write                 "1a ffffffffffffffff ffffffff 00 00" "WRITE (16)";
    0x8b      Out   60 Write   [READY|WRITES|ATOMIC|PROTECT] or_write::plan_or_write         "18 ffffffffffffffff ffffffff 00 00" "ORWRITE (16)";
    0x8e      Out   30 Write   [READY|WRITES|PROTECT] read_write::plan_write_and_verify      "16 ffffffffffffffff ffffffff 00 00" "WRITE AND VERIFY (16)";
    0x8f      Out   30 Compare [READY|READS|PROTECT] verify::plan_verify                     "16 ffffffffffffffff ffffffff 00 00" "VERIFY (16)";
    0x90      None  30 Other   [READY|READS]       cache::plan_prefetch                      "02 ffffffffffffffff ffffffff 1f 00" "PRE-FETCH (16)";
    0x91      None  60 Flush   [READY|CHANGES]     cache::plan_synchronize_cache             "06 ffffffffffffffff ffffffff 00 00" "SYNCHRONIZE CACHE (16)";
    0x93      Out  120 Write   [READY|WRITES|REPEATS|PROTECT] write_same::plan_write_same    "09 ffffffffffffffff ffffffff 00 00" "WRITE SAME (16)";
    0x9e/0x10 In    30 Other   [READY]             capacity::plan_read_capacity_16           "1f 0000000000000000 ffffffff 00 00" "READ CAPACITY (16)";
    0x9e/0x12 In    30 Other   [READY|THIN|READS]  lba_status::plan_get_lba_status           "1f ffffffffffffffff ffffffff 00 00" "GET LBA STATUS";
    0xa0      In    30 Other   [UNDER_ATTENTION]   report_luns::plan_report_luns             "00 ff 000000 ffffffff 00 00"        "REPORT LUNS";
    0xa3/0x0c In    30 Other   []                  report::plan_opcodes                      "1f 87 ff ffff ffffffff 00 00"       "REPORT SUPPORTED OPERATION CODES";
    0xa3/0x0d In    30 Other   []                  report::plan_task_functions               "1f 80 000000 ffffffff 00 00"        "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS";
    0xa8      In    30 Read    [READY|READS|PROTECT] read_write::plan_read                   "1a ffffffff ffffffff 00 00"         "READ (12)";
    0xaa      Out   30 Write   [READY|WRITES|PROTECT] read_write::plan_write                 "1a ffffffff ffffffff 00 00"         "WRITE (12)";
    0xae      Out   30 Write   [READY|WRITES|PROTECT] read_write::plan_write_and_verify      "16 ffffffff ffffffff 00 00"         "WRITE AND VERIFY (12)";
    0xaf      Out   30 Compare [READY|READS|PROTECT] verify::plan_verify                     "16 ffffffff ffffffff 00 00"         "VERIFY (12)";
    0xb7      In    30 Other   [READY|READS]       defects::plan_defects_12                  "1f ffffffff ffffffff 00 00"         "READ DEFECT DATA (12)";
};

/// Commands that can be sent to other targets, but are not supported by our LUs.
pub(super) static FOREIGN: [Opcode; 2] = table! {
    0xa3/0x05 In    30 Other   []                      report::plan_foreign                      "1f 0000 0000 ffffffff fe 00" "REPORT IDENTIFYING INFORMATION";
    0xa3/0x0a In    30 Other   []                      report::plan_foreign                      "ff 0000 0000 ffffffff 00 00" "REPORT TARGET PORT GROUPS";
};
