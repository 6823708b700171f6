//! Properties of commands that decide whether one may run.
//!
//! The opcode table has them for every command; the device server and the rules of reservations
//! look at nothing else.

use bitflags::bitflags;

bitflags! {
    /// Properties of a command.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct CommandFlags: u16 {
        /// Runs although a unit attention is pending (SAM-5 5.14.1).
        const UNDER_ATTENTION = 1 << 0;
        /// Needs a medium, and a unit that is started.
        const READY = 1 << 1;
        /// The command changes the medium.
        const WRITES = 1 << 2;
        /// Exists on thin provisioned units only.
        const THIN = 1 << 3;
        /// Writes by what it reads from the medium, which nothing else may change meanwhile.
        const ATOMIC = 1 << 4;
        /// Runs although another nexus has the unit by RESERVE (SPC-2 5.5.1).
        const UNDER_RESERVE = 1 << 5;
        /// Reads the medium or the mode parameters: conflicts with exclusive access (SPC-4 5.13).
        const READS = 1 << 6;
        /// Conflicts with any persistent reservation of others, as a write does.
        const CHANGES = 1 << 7;
        /// Changes the state of the unit, or its reservations, for every nexus. Refused through a
        /// read-only LUN, although the medium need not be writable: an initiator that may not write
        /// must not block those that may. (SPC-4 lets a write-protected medium be reserved, but has
        /// no rule for LUNs.)
        const SETTINGS = 1 << 8;
        /// Reports or changes persistent reservations: they must be known, and the command conflicts
        /// with RESERVE of any nexus, its own included (SPC-2 5.5.1).
        const RESERVATIONS = 1 << 9;
        /// Writes the one block that it takes to all of its blocks.
        const REPEATS = 1 << 10;
    }
}
