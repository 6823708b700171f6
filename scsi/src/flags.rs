//! Command flags, used to check whether a command is allowed.
//!
//! These are set for each command in the opcode table, and are the only property used by the device
//! server and the reservation rules.

use bitflags::bitflags;

bitflags! {
    /// Flags of a command.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct CommandFlags: u16 {
        /// Can be executed while a unit attention is pending (SAM-5 5.14.1).
        const UNDER_ATTENTION = 1 << 0;
        /// Requires a medium, and that the LU is started.
        const READY = 1 << 1;
        /// The command changes the medium.
        const WRITES = 1 << 2;
        /// Only supported by thin provisioned LUs.
        const THIN = 1 << 3;
        /// Reads from the medium and then writes based on this data, so the blocks must not be
        /// changed in between.
        const ATOMIC = 1 << 4;
        /// Can be executed while the LU is reserved by another nexus with RESERVE (SPC-2 5.5.1).
        const UNDER_RESERVE = 1 << 5;
        /// Reads the medium or the mode parameters, so it conflicts with exclusive access (SPC-4
        /// 5.13).
        const READS = 1 << 6;
        /// Conflicts with any persistent reservation held by another nexus, as a write does.
        const CHANGES = 1 << 7;
        /// Changes the state or the reservations of the LU for all nexuses. This is refused if the
        /// LUN is read-only, even though the medium doesn't need to be writable, because an
        /// initiator without write access must not be able to block other initiators. (In SPC-4, a
        /// write-protected medium can be reserved, but there is no rule for LUNs.)
        const SETTINGS = 1 << 8;
        /// Reads or changes persistent reservations. These must be known, and the command conflicts
        /// with RESERVE from any nexus, even the same one (SPC-2 5.5.1).
        const RESERVATIONS = 1 << 9;
        /// Writes the same block of data to each of its blocks.
        const REPEATS = 1 << 10;
        /// Has a field that selects the checks of protection information (RDPROTECT, WRPROTECT,
        /// VRPROTECT or ORPROTECT).
        const PROTECT = 1 << 11;
        /// Only supported by LUs with type 2 protection.
        const TYPE_2 = 1 << 12;
        /// Executes alone: after all older commands, and before all newer commands.
        const EXCLUSIVE = 1 << 13;
    }
}
