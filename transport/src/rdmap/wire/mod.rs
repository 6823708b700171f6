//! The iWARP wire format: what is in the TCP stream of a connection.
//!
//! | module | what it names |
//! | --- | --- |
//! | [`start`] | the frames with which a connection begins (RFC 5044 7.1, RFC 6581 9) |
//! | [`fpdu`] | framing of the stream: lengths, markers, CRC (RFC 5044 4) |
//! | [`ddp`] | headers of DDP and RDMAP (RFC 5041 4, RFC 5040 4, RFC 7306 5 and 6) |
//! | [`terminate`] | the message that ends a connection with its reason (RFC 5040 4.8) |
//!
//! Nothing here panics on a peer's bytes: the received length is the only authority.

pub mod ddp;
pub mod fpdu;
pub mod start;
pub mod terminate;

/// The bytes at an offset of a slice that is known to be long enough.
fn at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N]
        .try_into()
        .expect("as many bytes as were taken")
}
