//! The commands, grouped by family. Each family validates CDBs and provides a state machine to
//! execute the steps of a command.

pub(crate) mod cache;
pub(crate) mod capacity;
pub(crate) mod compare_and_write;
pub(crate) mod defects;
pub(crate) mod format_unit;
pub(crate) mod inquiry;
pub(crate) mod integrity;
pub(crate) mod lba_status;
pub(crate) mod machine;
mod mode_pages;
pub(crate) mod mode_select;
pub(crate) mod mode_sense;
pub(crate) mod or_write;
pub(crate) mod persistent_reserve;
pub(crate) mod plan;
pub(crate) mod read_write;
pub(crate) mod report_luns;
pub(crate) mod reserve;
mod threshold;
pub(crate) mod unit_state;
pub(crate) mod unmap;
pub(crate) mod verify;
mod vpd;
pub(crate) mod write_same;
