//! Parses the RoCEv2 packets in a capture without using the decoders to be tested.

/// A RoCEv2 packet with the sender, the base transport header and the data up to the ICRC.
pub struct Packet<'a> {
    /// IPv4 address of the sender.
    pub source: [u8; 4],
    /// Opcode in the base transport header.
    pub opcode: u8,
    /// Destination queue pair.
    pub destination_qp: u32,
    /// Data after the base transport header, not including padding and ICRC.
    pub rest: &'a [u8],
    /// UDP payload, from the base transport header to the ICRC.
    pub datagram: &'a [u8],
}

/// Returns the IPv4 RoCEv2 packets in a little-endian pcap file with Ethernet frames.
///
/// # Panics
/// Panics if the file has a different type or is corrupt.
pub fn packets(capture: &[u8]) -> impl Iterator<Item = Packet<'_>> {
    assert_eq!(capture[..4], [0xd4, 0xc3, 0xb2, 0xa1]);
    let mut at = 24;
    std::iter::from_fn(move || {
        let header = capture.get(at..at + 16)?;
        let len = u32::from_le_bytes(header[8..12].try_into().unwrap()) as usize;
        let frame = &capture[at + 16..at + 16 + len];
        at += 16 + len;
        Some(frame)
    })
    .filter_map(|frame| {
        let ip = frame.get(14..)?;
        if frame[12..14] != [0x08, 0x00] || ip[9] != 17 {
            return None;
        }
        let udp = &ip[usize::from(ip[0] & 0x0f) * 4..];
        if udp[2..4] != 4791u16.to_be_bytes() {
            return None;
        }
        let len = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
        let bth = &udp[8..len];
        let pad = usize::from(bth[1] >> 4 & 3);
        Some(Packet {
            source: ip[12..16].try_into().unwrap(),
            opcode: bth[0],
            destination_qp: u32::from_be_bytes([0, bth[5], bth[6], bth[7]]),
            rest: &bth[12..bth.len() - 4 - pad],
            datagram: bth,
        })
    })
}
