//! The iWARP wire format: data in the TCP stream of a connection.
//!
//! | module | contents |
//! | --- | --- |
//! | [`start`] | frames at the start of a connection (RFC 5044 7.1, RFC 6581 9) |
//! | [`fpdu`] | stream framing: lengths, markers, CRC (RFC 5044 4) |
//! | [`ddp`] | DDP and RDMAP headers (RFC 5041 4, RFC 5040 4, RFC 7306 5 and 6) |
//! | [`terminate`] | message used to close a connection with a reason (RFC 5040 4.8) |
//!
//! The parsers only rely on the received length, so that invalid data from a peer cannot cause a
//! panic.

pub mod ddp;
pub mod fpdu;
pub mod start;
pub mod terminate;

/// Returns the bytes at an offset. The slice must be long enough.
fn at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N]
        .try_into()
        .expect("length matches")
}
