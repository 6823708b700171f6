//! Mode parameters (SPC-4 7.5, SBC-3 6.5).

/// Offset of the threshold descriptor in the Logical Block Provisioning mode page, by which sense
/// data name the threshold (SBC-3 4.7.3.8, 6.5.9).
pub(crate) const THRESHOLD_DESCRIPTOR: usize = 16;
