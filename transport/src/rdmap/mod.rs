//! RDMAP over DDP over MPA: the wire format of iWARP.

pub mod wire;
