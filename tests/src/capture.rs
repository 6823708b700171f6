//! RoCEv2 packets of a capture, found without the decoders under test.

/// A RoCEv2 packet: sender, base transport header, and what follows up to the ICRC.
pub struct Packet<'a> {
    /// IPv4 address of the sender.
    pub source: [u8; 4],
    /// Opcode of the base transport header.
    pub opcode: u8,
    /// Queue pair that the packet is for.
    pub destination_qp: u32,
    /// What follows the base transport header, without padding and ICRC.
    pub rest: &'a [u8],
    /// The payload of the UDP datagram, from the base transport header to the ICRC.
    pub datagram: &'a [u8],
}

/// The RoCEv2 packets over IPv4 in a little-endian pcap file of Ethernet frames.
///
/// # Panics
/// If it is another kind of file, or is damaged.
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
