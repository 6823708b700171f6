//! SCSI with no transport in it, and the wire formats of the SCSI transports.

pub mod srp;
