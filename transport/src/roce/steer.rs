//! Selects the worker that should receive a datagram.
//!
//! All workers of a device share a UDP port. Since the low bits of a queue pair number contain the
//! worker index, packets can be steered by their destination queue pair. The exception is queue
//! pair 1, which is shared by all workers: here we use the communication id of the CM message,
//! which also contains the worker index in its low bits ([`worker_of`]). Other MADs are handled by
//! worker 0.
//!
//! If workers are processes, they don't know about the listeners of other workers
//! ([`Requests::ToFirst`]). In this case, messages without a local id are passed to worker 0, which
//! will find the right worker.
//!
//! The rule is implemented both as a function ([`steer`]) and as a classic BPF program for
//! `SO_ATTACH_REUSEPORT_CBPF` ([`program`]). The tests compare both for the same packets, and send
//! each CM message to sockets sharing a port. All offsets are relative to the start of the UDP
//! payload.

use crate::cm::worker_of;
use crate::wire::cm_msg::{
    CmAttribute, FIRST_ID_OFFSET, MAD_ATTRIBUTE_OFFSET, MAD_CLASS_OFFSET, SECOND_ID_OFFSET,
    is_request,
};
use crate::wire::mad::MadClass;

/// Offset of the BTH word with the destination QP in its low 24 bits.
const BTH_DEST: usize = 4;
/// Offset of the MAD after BTH and DETH.
const MAD: usize = 12 + 8;

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let b = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(b.try_into().ok()?))
}

/// Worker that handles CM messages without a local id: requests, and rejects from peers which have
/// not received a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Requests {
    /// Distribute messages to all workers based on the remote id. All workers need to have the same
    /// listeners.
    #[default]
    Spread,
    /// Send all messages to worker 0.
    ToFirst,
}

/// Returns which of the `1 << worker_bits` workers should receive a datagram, or `None` if the
/// datagram is too short.
#[must_use]
pub fn steer(datagram: &[u8], worker_bits: u8, requests: Requests) -> Option<u32> {
    let qpn = word(datagram, BTH_DEST)? & 0x00ff_ffff;
    // For QP1, the number does not tell us which worker to use.
    if qpn != 1 {
        return Some(qpn & ((1 << worker_bits) - 1));
    }
    let mad = datagram.get(MAD..)?;
    // Only CM messages contain ids. Everything else, e.g. an I/O unit query, is handled by worker
    // 0.
    if *mad.get(MAD_CLASS_OFFSET)? != MadClass::ComMgt as u8 {
        return Some(0);
    }
    let worker = worker_of(mad, worker_bits.into())?;
    match requests {
        Requests::ToFirst if is_request(mad) => Some(0),
        _ => Some(worker),
    }
}

/// Classic BPF instruction: code, jump if true, jump if false, operand.
pub type Instruction = (u16, u8, u8, u32);

const LD_W_ABS: u16 = 0x20;
const LD_H_ABS: u16 = 0x28;
const LD_B_ABS: u16 = 0x30;
const AND_K: u16 = 0x54;
const JEQ_K: u16 = 0x15;
const RET_A: u16 = 0x16;
const RET_K: u16 = 0x06;

/// Returns the rule as a BPF program. If a load is out of bounds, the program returns 0, i.e.
/// worker 0.
#[must_use]
pub fn program(worker_bits: u8, requests: Requests) -> [Instruction; 18] {
    /// Index of the instruction to load the first id, and of the one returning worker 0.
    const FIRST_ID: u8 = 14;
    const ZERO: u8 = 17;
    let mask = (1u32 << worker_bits) - 1;
    let request = match requests {
        Requests::Spread => FIRST_ID,
        Requests::ToFirst => ZERO,
    };
    // Jumps are relative to the next instruction.
    let if_attribute = |at: u8, attribute: CmAttribute, to: u8| {
        (JEQ_K, to - at - 1, 0, u32::from(attribute as u16))
    };
    [
        (LD_W_ABS, 0, 0, BTH_DEST as u32),
        (AND_K, 0, 0, 0x00ff_ffff),
        (JEQ_K, 2, 0, 1),
        (AND_K, 0, 0, mask),
        (RET_A, 0, 0, 0),
        (LD_B_ABS, 0, 0, (MAD + MAD_CLASS_OFFSET) as u32),
        (JEQ_K, 1, 0, MadClass::ComMgt as u32),
        (RET_K, 0, 0, 0),
        (LD_H_ABS, 0, 0, (MAD + MAD_ATTRIBUTE_OFFSET) as u32),
        if_attribute(9, CmAttribute::SidrRep, FIRST_ID),
        if_attribute(10, CmAttribute::Req, request),
        if_attribute(11, CmAttribute::SidrReq, request),
        (LD_W_ABS, 0, 0, (MAD + SECOND_ID_OFFSET) as u32),
        // If the id is zero, the sender doesn't know our id yet.
        (JEQ_K, request - 14, 1, 0),
        (LD_W_ABS, 0, 0, (MAD + FIRST_ID_OFFSET) as u32),
        (AND_K, 0, 0, mask),
        (RET_A, 0, 0, 0),
        (RET_K, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Requests::{Spread, ToFirst};
    use super::*;

    /// Runs a program like the kernel does. Returns `None` if a load is out of bounds.
    fn run(program: &[Instruction], packet: &[u8]) -> Option<u32> {
        let (mut a, mut pc) = (0u32, 0usize);
        loop {
            let (code, jt, jf, k) = program[pc];
            pc += 1;
            let load = |n: usize| {
                let b = packet.get(k as usize..k as usize + n)?;
                Some(b.iter().fold(0u32, |v, &x| v << 8 | u32::from(x)))
            };
            match code {
                LD_W_ABS => a = load(4)?,
                LD_H_ABS => a = load(2)?,
                LD_B_ABS => a = load(1)?,
                AND_K => a &= k,
                JEQ_K => pc += usize::from(if a == k { jt } else { jf }),
                RET_A => return Some(a),
                RET_K => return Some(k),
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    fn mad(attribute: u16, local: u32, remote: u32) -> Vec<u8> {
        let mut p = vec![0u8; 12 + 8 + 256 + 4];
        p[0] = 0x64;
        p[7] = 1;
        p[20] = 1;
        p[21] = 7;
        p[36..38].copy_from_slice(&attribute.to_be_bytes());
        p[44..48].copy_from_slice(&local.to_be_bytes());
        p[48..52].copy_from_slice(&remote.to_be_bytes());
        p
    }

    #[test]
    fn steering_uses_remote_id_for_requests() {
        assert_eq!(steer(&mad(0x10, 0x1235, 0), 2, Spread), Some(1));
        assert_eq!(steer(&mad(0x10, 0x1235, 2), 2, Spread), Some(1));
        assert_eq!(steer(&mad(0x13, 0x1235, 0x7777_0002), 2, Spread), Some(2));
        assert_eq!(steer(&mad(0x15, 0x1235, 0x7777_0003), 2, Spread), Some(3));
        let mut other_class = mad(0x13, 1, 3);
        other_class[21] = 6;
        assert_eq!(steer(&other_class, 2, Spread), Some(0));
        let mut data = vec![0; 16];
        data[5..8].copy_from_slice(&[0x12, 0x34, 0x57]);
        assert_eq!(steer(&data, 3, Spread), Some(7));
        assert_eq!(steer(&data, 0, Spread), Some(0));
        assert_eq!(steer(&data[..7], 3, Spread), None);
    }

    /// Returns datagrams for all CM messages, with any combination of known and unknown ids.
    fn cm_datagrams() -> Vec<Vec<u8>> {
        let ids = [0, 0x1235, 0x7777_0002, 0xffff_ffff];
        let mut datagrams = Vec::new();
        for attribute in 0x10..=0x1a {
            for first in ids {
                datagrams.extend(ids.map(|second| mad(attribute, first, second)));
            }
        }
        datagrams
    }

    #[test]
    fn bpf_program_matches_steer_function() {
        for datagram in cm_datagrams() {
            let worker = worker_of(&datagram[MAD..][..256], 2);
            assert_eq!(
                steer(&datagram, 2, Spread),
                worker,
                "{:02x?}",
                &datagram[36..52]
            );
            assert_eq!(run(&program(2, Spread), &datagram), worker);
        }
        // A reject from a peer which has not received a response, then a SIDR request and its
        // response.
        assert_eq!(steer(&mad(0x12, 0x1237, 0), 2, Spread), Some(3));
        assert_eq!(steer(&mad(0x12, 0x1237, 0x7777_0002), 2, Spread), Some(2));
        assert_eq!(steer(&mad(0x17, 0x1237, 0xffff_0000), 2, Spread), Some(3));
        assert_eq!(steer(&mad(0x18, 0x1237, 0x0000_0002), 2, Spread), Some(3));
    }

    #[test]
    fn requests_go_to_first_worker() {
        let (request, response) = (0x1235, 0x7777_0002);
        for (attribute, second, to) in [
            (0x10, 0, 0),        // REQ
            (0x10, response, 0), // REQ with a reserved field set
            (0x12, 0, 0),        // REJ without a reply
            (0x12, response, 2), // REJ after a REP
            (0x13, response, 2), // REP
            (0x17, 0, 0),        // SIDR_REQ
            (0x18, response, 1), // SIDR_REP, using the id of the request
        ] {
            let datagram = mad(attribute, request, second);
            assert_eq!(steer(&datagram, 2, ToFirst), Some(to), "{attribute:#x}");
            assert_eq!(run(&program(2, ToFirst), &datagram), Some(to));
        }
    }

    #[test]
    fn shared_sockets_receive_steered_packets() {
        use std::net::UdpSocket;
        use std::time::Duration;

        use socket2::{Domain, Socket, Type};

        let mut port = 0;
        let sockets: Vec<UdpSocket> = (0..4)
            .map(|_| {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
                socket.set_reuse_port(true).unwrap();
                let addr = std::net::SocketAddr::from(([127, 0, 0, 1], port));
                socket.bind(&addr.into()).unwrap();
                crate::roce::sys::attach_selector(&socket, 2, Spread).unwrap();
                let socket = UdpSocket::from(socket);
                port = socket.local_addr().unwrap().port();
                socket
                    .set_read_timeout(Some(Duration::from_secs(10)))
                    .unwrap();
                socket
            })
            .collect();
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        for datagram in cm_datagrams() {
            peer.send_to(&datagram, ("127.0.0.1", port)).unwrap();
            let worker = steer(&datagram, 2, Spread).unwrap() as usize;
            let mut got = [0; 512];
            let len = sockets[worker].recv(&mut got).unwrap();
            assert_eq!(got[..len], datagram);
        }
    }

    proptest! {
        #[test]
        fn program_and_function_agree(
            mut packet in proptest::collection::vec(any::<u8>(), 0..80),
            gsi: bool, cm: bool, attribute in 0u8..0x20, bits in 0u8..6, to_first: bool,
        ) {
            if gsi && packet.len() > 8 {
                packet[5..8].copy_from_slice(&[0, 0, 1]);
            }
            if cm && packet.len() > 22 {
                packet[21] = 7;
            }
            if attribute >= 0x10 && packet.len() > 40 {
                packet[36..38].copy_from_slice(&[0, attribute]);
            }
            let requests = if to_first { ToFirst } else { Spread };
            let program = program(bits, requests);
            // Datagrams that are too short are handled by worker 0, as well as those for which the
            // program returns before reaching the missing part.
            let or_first = |to: Option<u32>| if to_first { to.or(Some(0)) } else { to };
            prop_assert_eq!(
                or_first(run(&program, &packet)),
                or_first(steer(&packet, bits, requests))
            );
        }
    }
}
